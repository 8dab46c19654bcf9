//! Limits of what a pickle may take.

/// The longest pickle that is read: one of 1,000,000 tensors takes about 150 MB. Positions in the arena have 32 bits,
/// and this limit keeps them in range.
pub const MAX_PICKLE_BYTES: u64 = 256 << 20;

/// Maximum number of values. A tensor takes about 16; at 9 bytes each, this is 144 MB.
pub const MAX_NODE_COUNT: usize = 16 << 20;

/// Maximum number of remembered values, of which a tensor has about 7.
pub const MAX_MEMO_COUNT: usize = 8 << 20;

/// Maximum number of opcodes. A tensor takes about 35.
pub const MAX_OPCODE_COUNT: u64 = 64 << 20;

/// Maximum number of open marks: containers being built inside one another. torch writes fewer than 20.
pub const MAX_MARK_COUNT: usize = 10_000;

/// The longest whole number in bytes; torch's magic number has 10.
pub const MAX_INTEGER_BYTES: usize = 1 << 10;

/// Bytes that values may take, however small the pickle is in its file. Some thousand tensors fit.
const MIN_ALLOWANCE_BYTES: u64 = 16 << 20;

/// Bytes that values may take for each byte of the pickle in its file. Training checkpoints need 2 to 3, or 11 if
/// compressed.
const MAX_VALUE_BYTES_PER_BYTE: u64 = 24;

/// Bytes that the values of a pickle may take, given its length in the file. So a small file stays small in memory,
/// however well it was compressed.
pub fn memory_allowance(stored_len: u64) -> u64 {
    stored_len.saturating_mul(MAX_VALUE_BYTES_PER_BYTE).saturating_add(MIN_ALLOWANCE_BYTES)
}
