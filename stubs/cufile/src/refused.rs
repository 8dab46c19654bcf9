//! Functions that programs name and no test of ours calls. In: anything. Out: a refusal.

/// Nothing is written: PyTorch wants the name to be there.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileWrite(_: usize, _: u64, _: usize, _: i64, _: i64) -> isize {
    const NOT_PERMITTED: isize = -1;
    NOT_PERMITTED
}
