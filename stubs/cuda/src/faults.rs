//! What goes wrong, by the caller's doing or by a test's wish. In: the words of a fault, or the plan of the
//! calls that are to fail. Out: an answer, and words on standard error.

use crate::codes::{self, Code};
use crate::driver::Driver;
use crate::settings::Failure;

impl Driver {
    /// Tells and counts a fault of the caller, and ends the process, unless it is to go on with an answer.
    pub fn fault(&mut self, code: Code, words: impl AsRef<str>) -> Code {
        let words = format!("{}: {}", self.call, words.as_ref());
        eprintln!("stub CUDA: fault in {words}");
        self.faults.push(words);
        if self.settings.faults_abort {
            self.report_where_asked();
            std::process::abort();
        }
        code
    }

    /// Plans that the nth call of a name from now on fails.
    pub fn plan_failure(&mut self, name: String, nth: u64, code: Code) {
        let nth = nth + self.calls.get(name.as_str()).copied().unwrap_or(0);
        self.settings.failures.push(Failure { name, nth, code });
    }

    /// What the nth call of a name is to answer by plan.
    pub fn planned_failure(&mut self, name: &str, nth: u64) -> Option<Code> {
        let found = self.settings.failures.iter().find(|f| f.name == name && f.nth == nth)?;
        let code = found.code;
        if codes::is_sticky(code) {
            self.sticky = Some(code);
        }
        Some(code)
    }

    /// The end of the process: what was left behind is looked at for the last time, and told.
    pub fn end(&mut self) {
        self.call = "the end of the process";
        for words in self.device.broken_guards() {
            self.fault(codes::ILLEGAL_ADDRESS, words);
        }
        self.report_where_asked();
    }
}
