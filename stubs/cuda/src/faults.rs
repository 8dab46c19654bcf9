//! Faults of the caller, and failures that a test has planned.

use crate::codes::{self, Code};
use crate::driver::Driver;
use crate::settings::Failure;

impl Driver {
    /// Prints and counts a fault of the caller. It ends the process, unless the settings ask for a code instead.
    pub fn fault(&mut self, code: Code, words: impl AsRef<str>) -> Code {
        let words = format!("{}: {}", self.call, words.as_ref());
        eprintln!("stub CUDA: fault in {words}");
        self.faults.push(words);
        if self.settings.faults_abort {
            self.write_report();
            std::process::abort();
        }
        code
    }

    /// Plans a failure of the nth call of a name from now on.
    pub fn plan_failure(&mut self, name: String, nth: u64, code: Code) {
        let nth = nth + self.calls.get(name.as_str()).copied().unwrap_or(0);
        self.settings.failures.push(Failure { name, nth, code });
    }

    /// The planned code of the nth call of a name.
    pub fn planned_failure(&mut self, name: &str, nth: u64) -> Option<Code> {
        let found = self.settings.failures.iter().find(|f| f.name == name && f.nth == nth)?;
        let code = found.code;
        if codes::is_sticky(code) {
            self.sticky = Some(code);
        }
        Some(code)
    }

    /// The end of the process: checks what is left behind, and writes the report.
    pub fn end(&mut self) {
        self.call = "the end of the process";
        for words in self.device.broken_guards() {
            self.fault(codes::ILLEGAL_ADDRESS, words);
        }
        self.write_report();
    }
}
