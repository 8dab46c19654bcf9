//! What a node of a pickle is: a tensor, a container, a plain value, or an object.
//!
//! Only executing the pickle would make an object, so it is refused.

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::Dtype;

use super::names::class_name;
use super::pickle::{Arena, Node, NodeId};
use super::tensor_view::{TensorView, rank_piece_class, tensor_of_call};

/// The meaning of a node.
pub enum PickleValue<'a> {
    Entries(&'a [(NodeId, NodeId)]),
    /// A list or tuple.
    Items(&'a [NodeId]),
    /// A tensor, or why it cannot be shown.
    Tensor(Result<TensorView<'a>, TensorError>),
    /// A number, a text, or another value that no tensor depends on.
    Plain,
    /// An object, by its class.
    Object(String),
}

/// Finds what a node means, by the class or function that it names. Unknown ones make objects, which are refused.
pub fn interpret(arena: &Arena, id: NodeId) -> PickleValue<'_> {
    match arena.node(id) {
        Node::None | Node::Bool(_) | Node::Int(_) | Node::Long(_) | Node::Plain | Node::Text(_) => {
            PickleValue::Plain
        }
        Node::Tuple(_) | Node::List(_) => PickleValue::Items(arena.items(id).unwrap_or_default()),
        Node::Dict(_) => PickleValue::Entries(arena.entries(id).unwrap_or_default()),
        Node::Persistent(_) => PickleValue::Object("torch storage".to_owned()),
        Node::Opaque(what) => PickleValue::Object(what.to_owned()),
        Node::Global(..) => match arena.global(id) {
            Some(("torch", name)) if is_torch_constant(name) => PickleValue::Plain,
            _ => PickleValue::Object(class_name(arena, id)),
        },
        Node::Call(callable, args) => {
            let args = arena.items(args).unwrap_or_default();
            if let Some(tensor) = tensor_of_call(arena, callable, args) {
                let modified = arena.is_modified(id);
                return PickleValue::Tensor(if modified {
                    Err(TensorError::Modified)
                } else {
                    tensor
                });
            }
            match arena.global(callable) {
                Some(call) if is_plain_call(call) => PickleValue::Plain,
                _ => match arena.global(callable).and_then(rank_piece_class) {
                    Some(class) => PickleValue::Tensor(Err(TensorError::RankPiece { class })),
                    None => PickleValue::Object(class_name(arena, callable)),
                },
            }
        }
    }
}

/// Whether a name in torch stands for itself: a dtype, layout, memory format or quantisation scheme.
fn is_torch_constant(name: &str) -> bool {
    let is_numbered = |prefix: &str| {
        let digits = |rest: &str| rest.bytes().next().is_some_and(|b| b.is_ascii_digit());
        name.strip_prefix(prefix).is_some_and(digits)
    };
    Dtype::from_torch_name(name).is_some()
        || Dtype::is_unsupported_by_safetensors(name)
        // Types of elements that are newer than this table.
        || ["float", "bfloat"].into_iter().any(is_numbered)
        || ["sparse_", "per_tensor_", "per_channel_"]
            .into_iter()
            .any(|prefix| name.starts_with(prefix))
        || matches!(
            name,
            "bit"
                | "strided"
                | "jagged"
                | "_mkldnn"
                | "channels_last"
                | "contiguous_format"
                | "preserve_format"
        )
}

/// Whether a call gives a number, a text, or a set of them.
fn is_plain_call(call: (&str, &str)) -> bool {
    matches!(
        call,
        ("torch", "Size" | "device")
            | ("torch.serialization", "_get_layout")
            | ("_codecs", "encode")
            | (
                "builtins" | "__builtin__",
                "set" | "frozenset" | "complex" | "bytearray" | "range" | "slice"
            )
            | ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar")
            | ("numpy", "dtype")
            | ("datetime", "datetime" | "date" | "time" | "timedelta")
            | ("pathlib", "Path" | "PosixPath" | "WindowsPath" | "PurePosixPath")
            | ("decimal", "Decimal")
            | ("uuid", "UUID")
    )
}
