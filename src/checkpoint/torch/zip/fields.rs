//! The fixed fields of zip headers.

/// Reads consecutive little-endian fields of a slice that is long enough for them.
pub struct FieldReader<'a>(pub &'a [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) =
            self.0.split_first_chunk::<N>().expect("the fixed part holds all its fields");
        self.0 = rest;
        *field
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
