//! Entries that cannot be shown, and why.

use std::borrow::Cow;

/// An entry of the selected dictionary that cannot be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{name}`: {error}")]
pub struct RefusedEntry {
    /// Its name, as a tensor of that name would be called.
    pub name: String,
    /// What is wrong.
    pub error: TensorError,
}

/// The name that safetensors keeps for metadata.
pub const RESERVED_NAME: &str = "__metadata__";

/// Why an entry cannot be shown.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// Not a tensor, and not a plain value either.
    #[error("is a Python object of class {class}, which is not executed")]
    Object { class: String },
    /// A kind of tensor that safetensors lacks.
    #[error("is {kind}, which safetensors cannot hold")]
    UnsupportedKind {
        /// The kind, with its article.
        kind: String,
    },
    /// An element type that safetensors lacks.
    #[error("has elements of type {dtype}, which safetensors cannot hold")]
    UnsupportedDtype {
        /// torch's name for it.
        dtype: String,
    },
    /// An element type that is not known here.
    #[error("has elements of type {dtype}, which this version of ckptfs does not know")]
    UnknownDtype {
        /// torch's name for it.
        dtype: String,
    },
    /// A piece of a tensor in one rank's file.
    #[error("is one rank's piece of a tensor ({class})")]
    RankPiece {
        /// torch's class for it.
        class: &'static str,
    },
    /// The bytes are not the values.
    #[error("is a {view} view: its bytes are not its values")]
    LazyView {
        /// `conjugate` or `negative`.
        view: &'static str,
    },
    /// The tensor reaches past its storage.
    #[error("reaches past the end of its storage `{storage}` ({needs} bytes needed, {has} there)")]
    OutOfBounds {
        storage: String,
        /// The bytes that the tensor needs.
        needs: u128,
        /// The bytes of the storage.
        has: u64,
    },
    /// The storage's stated size is not that of its record.
    #[error("its storage `{storage}` states {stated} bytes and has {has}")]
    StorageSize {
        storage: String,
        /// The bytes that the pickle states.
        stated: u128,
        /// The bytes in the file.
        has: u64,
    },
    /// The storage is not in the file.
    #[error("its storage `{storage}` is not in the file")]
    MissingStorage { storage: String },
    /// The storage is packed in a way that is not read, or too large to unpack.
    #[error("its storage `{storage}` is compressed {why}")]
    Compressed {
        storage: String,
        /// Why it is not unpacked.
        why: &'static str,
    },
    /// A shape whose size overflows.
    #[error("has a shape whose size overflows")]
    Overflow,
    /// Repeated bytes beyond the limit.
    #[error(
        "repeats its bytes: with the repeated tensors before it, {bytes} bytes; the limit is {limit}"
    )]
    Expansion {
        /// The bytes that it would take.
        bytes: u64,
        limit: u64,
    },
    /// Arguments that torch never writes.
    #[error("is not rebuilt as torch does it: {what}")]
    Malformed {
        /// What is wrong with them.
        what: &'static str,
    },
    /// The pickle changes it after it was built.
    #[error("is changed by the pickle after it was built")]
    Modified,
    /// A key that cannot be the name of a tensor.
    #[error("has a key that is not text, or is longer than any name")]
    InvalidKey,
    /// A name that the format reserves.
    #[error("has the name that safetensors keeps for metadata")]
    ReservedName,
}

impl TensorError {
    /// What the user can do. `may_leave_out` says whether other tensors remain without it.
    pub fn remedy(&self, may_leave_out: bool) -> Cow<'static, str> {
        let own = match self {
            TensorError::OutOfBounds { .. }
            | TensorError::StorageSize { .. }
            | TensorError::MissingStorage { .. }
            | TensorError::Overflow
            | TensorError::Malformed { .. }
            | TensorError::Modified => {
                return "fetch the file again: it is damaged or was tampered with".into();
            }
            TensorError::Compressed { .. } => {
                return "save it again with torch.save, which does not compress".into();
            }
            TensorError::Object { .. } => {
                "in the program that wrote it, save the tensors in it as a plain dictionary"
            }
            TensorError::UnsupportedKind { .. } => {
                "in the program that wrote it, save it as a plain tensor (to_dense(), dequantize() or cpu())"
            }
            TensorError::UnsupportedDtype { .. } => {
                "in the program that wrote it, save it in a type that safetensors has, with to()"
            }
            TensorError::UnknownDtype { .. } => {
                concat!("read it with a newer ckptfs (this is ", env!("CARGO_PKG_VERSION"), ")")
            }
            TensorError::RankPiece { .. } => "in the program that wrote it, save the whole of it",
            TensorError::LazyView { .. } => {
                "in the program that wrote it, save its values: resolve_conj().resolve_neg()"
            }
            TensorError::Expansion { .. } => {
                "in the program that wrote it, save it with contiguous()"
            }
            TensorError::InvalidKey | TensorError::ReservedName => {
                "in the program that wrote it, save it under another name"
            }
        };
        if may_leave_out {
            format!("leave it out with --allow-partial; or, {own}").into()
        } else {
            own.into()
        }
    }
}
