//! Why a pickle cannot be read.

/// What is wrong with a pickle.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PickleError {
    /// It stops in the middle.
    #[error("it ends before it is complete")]
    Truncated,
    /// A protocol that is not read.
    #[error("protocol {0}; 2 to 5 are read")]
    Protocol(u8),
    /// An opcode that does not exist, or has no place in a checkpoint.
    #[error("unknown opcode 0x{opcode:02x} at byte {at}")]
    Opcode {
        /// The opcode.
        opcode: u8,
        /// Where.
        at: usize,
    },
    /// An opcode that finds less on the stack than it takes, or something else.
    #[error("opcode 0x{opcode:02x} at byte {at} is out of order")]
    OutOfOrder {
        /// The opcode.
        opcode: u8,
        /// Where.
        at: usize,
    },
    /// A number or name that is none.
    #[error("malformed value at byte {at}")]
    MalformedValue {
        /// Where.
        at: usize,
    },
    /// Bytes after its end.
    #[error("{0} bytes follow its end")]
    TrailingBytes(usize),
    /// Its values take too much memory for its size in the file.
    #[error("its values take more than {limit} bytes, which is too much for its size in the file")]
    MemoryLimit {
        /// The bytes that they may take.
        limit: u64,
    },
    /// More than any checkpoint has.
    #[error("more than {limit} {what}")]
    CountLimit {
        /// What there are too many of.
        what: &'static str,
        /// How many may be.
        limit: u64,
    },
}
