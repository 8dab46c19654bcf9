//! Numbers that do not fit 32 bits.

/// The tag of the extra field with such numbers.
const ZIP64_TAG: u16 = 1;

/// The value of a number that stands in that field.
pub const ZIP64_MARKER: u64 = 0xffff_ffff;

/// Replaces the numbers that do not fit 32 bits by those of the zip64 field, in their order.
///
/// `None` if the extra fields are damaged, or if the zip64 field occurs twice or lacks a number.
pub fn resolve_zip64<'a>(extra: &[u8], numbers: impl Iterator<Item = &'a mut u64>) -> Option<()> {
    let mut wide: Option<&[u8]> = None;
    let mut rest = extra;
    // Some writers pad the end with zeros that are too short for a field.
    while rest.len() >= 4 {
        let (tag, len) = (
            u16::from_le_bytes([rest[0], rest[1]]),
            u16::from_le_bytes([rest[2], rest[3]]) as usize,
        );
        let field = rest.get(4..4 + len)?;
        if tag == ZIP64_TAG && wide.replace(field).is_some() {
            return None;
        }
        rest = &rest[4 + len..];
    }
    let mut wide = wide.unwrap_or_default();
    for number in numbers {
        let (raw, after) = wide.split_first_chunk::<8>()?;
        *number = u64::from_le_bytes(*raw);
        wide = after;
    }
    Some(())
}
