//! Why a pickle cannot be read.

/// What is wrong with a pickle.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PickleError {
    /// It ends too early.
    #[error("it ends before it is complete")]
    Truncated,
    /// A protocol that is not read.
    #[error("protocol {0}; 2 to 5 are read")]
    Protocol(u8),
    /// An opcode that does not exist, or has no place in a checkpoint.
    #[error("unknown opcode 0x{opcode:02x} at byte {at}")]
    Opcode { opcode: u8, at: usize },
    /// An opcode that finds too few values on the stack, or values of the wrong kind.
    #[error("opcode 0x{opcode:02x} at byte {at} is out of order")]
    OutOfOrder { opcode: u8, at: usize },
    /// A number or name that is malformed.
    #[error("malformed value at byte {at}")]
    MalformedValue { at: usize },
    /// Bytes after its end.
    #[error("{0} bytes follow its end")]
    TrailingBytes(usize),
    /// Its values take too much memory for its size in the file.
    #[error("its values take more than {limit} bytes, which is too much for its size in the file")]
    MemoryLimit { limit: u64 },
    /// More of something than any checkpoint has.
    #[error("more than {limit} {what}")]
    CountLimit {
        /// What there are too many of.
        what: &'static str,
        limit: u64,
    },
}

impl PickleError {
    /// What the user can do.
    pub fn remedy(&self) -> &'static str {
        match self {
            PickleError::Protocol(_) => {
                "save it again with torch.save, whose pickle_protocol is 2 unless it is given"
            }
            PickleError::MemoryLimit { .. } | PickleError::CountLimit { .. } => {
                "in the program that wrote it, save the state dict alone"
            }
            _ => {
                "fetch the file again; if it comes from someone you do not know, do not open it with torch.load"
            }
        }
    }
}
