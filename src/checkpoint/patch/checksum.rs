//! The checksums with which deltas verify the bytes of a tensor.

use crate::checkpoint::tensor::ChecksumFormat;

/// Computes a checksum of bytes that come in parts.
pub enum Hasher {
    Xxh3(Box<xxhash_rust::xxh3::Xxh3>),
    Blake3(Box<blake3::Hasher>),
    Adler32(simd_adler32::Adler32),
}

impl Hasher {
    pub fn new(format: ChecksumFormat) -> Hasher {
        match format {
            ChecksumFormat::Xxh3 => Hasher::Xxh3(Box::default()),
            ChecksumFormat::Blake3 => Hasher::Blake3(Box::default()),
            ChecksumFormat::Adler32 => Hasher::Adler32(simd_adler32::Adler32::new()),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Xxh3(hasher) => hasher.update(bytes),
            Hasher::Blake3(hasher) => drop(hasher.update(bytes)),
            Hasher::Adler32(hasher) => hasher.write(bytes),
        }
    }

    /// The checksum as deltas write it: hexadecimal, in lower case.
    pub fn digits(&self) -> String {
        match self {
            Hasher::Xxh3(hasher) => format!("{:032x}", hasher.digest128()),
            Hasher::Blake3(hasher) => hasher.finalize().to_hex().to_string(),
            Hasher::Adler32(hasher) => format!("{:08x}", hasher.finish()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values are those of xxhash 3.6, blake3 1.0 and zlib in Python.
    #[test]
    fn checksums_are_those_of_the_libraries_of_trainers() {
        for (format, digits) in [
            (ChecksumFormat::Xxh3, "06b05ab6733a618578af5f94892f3950"),
            (
                ChecksumFormat::Blake3,
                "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
            ),
            (ChecksumFormat::Adler32, "024d0127"),
        ] {
            let mut hasher = Hasher::new(format);
            hasher.update(b"a");
            hasher.update(b"bc");
            assert_eq!(hasher.digits(), digits);
            assert_eq!(digits.len(), format.digit_count());
        }
    }
}
