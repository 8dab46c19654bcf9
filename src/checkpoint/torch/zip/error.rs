//! Why a zip archive cannot be read.

use crate::source::SourceError;

/// What is wrong with an archive.
#[allow(missing_docs)] // The messages say it.
#[derive(Debug, thiserror::Error)]
pub enum ZipError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("it does not end as a zip archive does: it is cut off, or something follows it")]
    NoEnd,
    #[error("its end record states {stated} records and there are {found}")]
    CountMismatch { stated: u64, found: u64 },
    #[error("its directory is not where the end record says, or is damaged")]
    Directory,
    #[error("its directory would take {0} bytes, more than any checkpoint's")]
    DirectoryTooLarge(u64),
    #[error("it spans several disks")]
    SeveralDisks,
    #[error("record `{0}` is there twice")]
    DuplicateRecord(String),
    #[error("record `{0}` lies outside the folder that the others share")]
    OutsideFolder(String),
    #[error("record `{0}` is encrypted")]
    Encrypted(String),
    #[error("record `{0}` uses features that torch does not write")]
    UnknownFlags(String),
    #[error(
        "record `{0}` has another name, size or method in its own header than in the directory"
    )]
    HeaderMismatch(String),
    #[error("record `{0}` overlaps another")]
    Overlap(String),
    #[error("a record has a name that is not UTF-8")]
    InvalidName,
    #[error("bytes before the first record")]
    LeadingBytes,
    #[error("it has no `data.pkl`")]
    NoPickle {
        /// Whether its records are arrays of numpy.
        has_arrays: bool,
    },
    #[error("record `{0}` is compressed in a way that is not read, or too large to unpack")]
    Compressed(String),
    #[error("its byte order is stated as neither little nor big")]
    ByteOrder,
}

impl ZipError {
    /// What the user can do.
    pub fn remedy(&self) -> &'static str {
        match self {
            ZipError::NoPickle { .. } => "give a checkpoint: this is a zip archive of another kind",
            ZipError::NoEnd => "fetch it again: most often the download was cut off",
            ZipError::Encrypted(_) | ZipError::Compressed(_) => {
                "save it again with torch.save, which neither encrypts nor compresses"
            }
            _ => "fetch it again, and do not trust it: programs could disagree on what it holds",
        }
    }
}
