//! How a call ends, and the error that a thread can ask for afterwards. In: what was done. Out: the answer.

use std::cell::Cell;

use crate::codes::{self, Code, Done};

thread_local! {
    static LAST: Cell<Code> = const { Cell::new(codes::SUCCESS) };
}

/// Answers a call. An error stays the last one of the thread until it is taken or another comes.
pub fn answer(body: impl FnOnce() -> Done) -> Code {
    let code = body().err().unwrap_or(codes::SUCCESS);
    if code != codes::SUCCESS {
        // A thread that ends asks for no error any more.
        let _ = LAST.try_with(|last| last.set(code));
    }
    code
}

/// The last error of the thread.
pub fn last() -> Code {
    LAST.try_with(Cell::get).unwrap_or(codes::SUCCESS)
}

/// The last error of the thread, which has none then.
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
