//! The result of a call, and the last error of a thread.

use std::cell::Cell;

use crate::codes::{self, Code, Done};

thread_local! {
    static LAST: Cell<Code> = const { Cell::new(codes::SUCCESS) };
}

/// The code of a result. An error stays the thread's last one until it is taken or another comes.
pub fn answer(body: impl FnOnce() -> Done) -> Code {
    let code = body().err().unwrap_or(codes::SUCCESS);
    if code != codes::SUCCESS {
        // A thread that is ending asks for no error any more.
        let _ = LAST.try_with(|last| last.set(code));
    }
    code
}

/// The last error of the thread.
pub fn last() -> Code {
    LAST.try_with(Cell::get).unwrap_or(codes::SUCCESS)
}

/// Takes the last error of the thread.
pub fn take_last() -> Code {
    LAST.try_with(|last| last.replace(codes::SUCCESS)).unwrap_or(codes::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_the_last_of_its_thread_until_it_is_taken() {
        assert_eq!(answer(|| Err(codes::NOT_SUPPORTED)), codes::NOT_SUPPORTED);
        assert_eq!(answer(|| Err(codes::INVALID_VALUE)), codes::INVALID_VALUE);
        assert_eq!(answer(|| Ok(())), codes::SUCCESS);
        assert_eq!(last(), codes::INVALID_VALUE);
        let elsewhere = std::thread::spawn(last).join();
        assert_eq!(elsewhere.unwrap(), codes::SUCCESS);
        assert_eq!(take_last(), codes::INVALID_VALUE);
        assert_eq!(last(), codes::SUCCESS);
    }
}
