//! Whole numbers of a pickle.

use super::limits::MAX_INTEGER_BYTES;

/// Parses decimal digits, which may end with Python 2's `L`. `None` if they are malformed; `Some(None)` if the number
/// does not fit 64 bits.
pub fn parse_decimal(line: &[u8]) -> Option<Option<i64>> {
    let digits = line.strip_suffix(b"L").unwrap_or(line);
    let text = std::str::from_utf8(digits).ok()?;
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let is_valid = !unsigned.is_empty()
        && unsigned.len() <= MAX_INTEGER_BYTES
        && unsigned.bytes().all(|b| b.is_ascii_digit());
    is_valid.then(|| text.parse().ok())
}

/// Decodes a little-endian number in two's complement; `None` if it has more than 64 bits.
pub fn decode_long(bytes: &[u8]) -> Option<i64> {
    let is_negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut wide = [if is_negative { 0xff } else { 0 }; 8];
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(i64::from_le_bytes(wide))
}
