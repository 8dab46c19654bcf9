//! The tensors that calls in a pickle would make, as views of storages.

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::Dtype;

use super::names::{class_name, shorten_name};
use super::pickle::{Arena, Node, NodeId};
use super::storage_ref::{StorageRef, as_count, storage_ref};

/// Maximum number of dimensions: torch's own limit.
const MAX_DIM_COUNT: usize = 64;

/// Maximum number of attributes of one tensor. They are searched for each tensor that has them.
const MAX_ATTRIBUTE_COUNT: usize = 256;

/// Maximum depth of tensors wrapped in one another; torch never writes more than two.
const MAX_WRAPPING_COUNT: usize = 8;

/// torch's classes for one rank's piece of a tensor.
const RANK_PIECE_CLASSES: [&str; 2] = ["DTensor", "ShardedTensor"];

const MALFORMED_ARGS: TensorError =
    TensorError::Malformed { what: "its arguments are not those that torch writes" };

/// A tensor as torch describes it: a view of a storage. Counts are in elements.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// Its class, if a library adds that class to torch's own.
    pub class: Option<String>,
    pub storage: StorageRef<'a>,
    pub dtype: Dtype,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub stride: Vec<u64>,
}

/// The tensor that a call would make; `None` if the call makes no tensor.
pub fn tensor_of_call<'a>(
    arena: &'a Arena,
    callable: NodeId,
    args: &[NodeId],
) -> Option<Result<TensorView<'a>, TensorError>> {
    wrapped_tensor(arena, callable, args, MAX_WRAPPING_COUNT)
}

fn wrapped_tensor<'a>(
    arena: &'a Arena,
    callable: NodeId,
    args: &[NodeId],
    wrappings: usize,
) -> Option<Result<TensorView<'a>, TensorError>> {
    let kind = |what: &str| Some(Err(TensorError::UnsupportedKind { kind: what.to_owned() }));
    let (module, name) = arena.global(callable)?;
    if !matches!(module, "torch._utils" | "torch._tensor" | "torch") {
        return None;
    }
    let within = |id: NodeId| {
        if wrappings == 0 {
            return Err(MALFORMED_ARGS);
        }
        if arena.is_modified(id) {
            return Err(TensorError::Modified);
        }
        match arena.node(id) {
            Node::Call(callable, args) => {
                let args = arena.items(args).unwrap_or_default();
                wrapped_tensor(arena, callable, args, wrappings - 1).unwrap_or(Err(MALFORMED_ARGS))
            }
            _ => Err(MALFORMED_ARGS),
        }
    };
    match (name, args) {
        ("_rebuild_tensor", &[storage, offset, shape, stride]) => {
            Some(typed_view(arena, storage, offset, shape, stride))
        }
        // The rest: requires_grad, backward_hooks and, in newer files, metadata.
        ("_rebuild_tensor_v2", &[storage, offset, shape, stride, _, _, ref metadata @ ..])
            if metadata.len() <= 1 =>
        {
            Some(
                check_metadata(arena, metadata)
                    .and_then(|()| typed_view(arena, storage, offset, shape, stride)),
            )
        }
        // The rest: requires_grad, backward_hooks, dtype and, in newer files, metadata.
        (
            "_rebuild_tensor_v3",
            &[storage, offset, shape, stride, _, _, dtype, ref metadata @ ..],
        ) if metadata.len() <= 1 => Some(check_metadata(arena, metadata).and_then(|()| {
            let dtype = torch_dtype(arena, dtype)?;
            Ok(TensorView { dtype, ..untyped_view(arena, storage, offset, shape, stride)? })
        })),
        ("_rebuild_parameter", &[data, _, _]) => Some(within(data)),
        ("_rebuild_parameter_with_state", &[data, _, _, state]) => {
            Some(check_attributes(arena, state).and_then(|()| within(data)))
        }
        // The function, the class of the result, the arguments, the attributes of the result.
        ("_rebuild_from_type_v2" | "_rebuild_from_type", &[function, class, args, state]) => {
            Some(subclass_view(arena, function, class, args, state, wrappings))
        }
        ("_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor", _) => kind("a sparse tensor"),
        ("_rebuild_qtensor", _) => kind("a quantised tensor"),
        ("_rebuild_nested_tensor", _) => kind("a nested tensor"),
        ("_rebuild_meta_tensor_no_storage", _) => {
            kind("a tensor of the meta device, without values")
        }
        ("_rebuild_wrapper_subclass", args) => {
            match args.first().and_then(|&class| arena.global(class)).and_then(rank_piece_class) {
                Some(class) => Some(Err(TensorError::RankPiece { class })),
                None => kind("a tensor that wraps others"),
            }
        }
        (
            "_rebuild_device_tensor_from_numpy"
            | "_rebuild_device_tensor_from_cpu_tensor"
            | "_rebuild_xla_tensor",
            _,
        ) => kind("a tensor of a device that saves through numpy"),
        (name, _) if name.starts_with("_rebuild_") => Some(Err(MALFORMED_ARGS)),
        _ => None,
    }
}

/// A tensor of another class: the function that makes it, its arguments, the class, and its attributes.
fn subclass_view<'a>(
    arena: &'a Arena,
    function: NodeId,
    class: NodeId,
    args: NodeId,
    state: NodeId,
    wrappings: usize,
) -> Result<TensorView<'a>, TensorError> {
    let wrappings = wrappings.checked_sub(1).ok_or(MALFORMED_ARGS)?;
    if let Some(class) = arena.global(class).and_then(rank_piece_class) {
        return Err(TensorError::RankPiece { class });
    }
    let args = match arena.node(args) {
        Node::Tuple(_) => arena.items(args).unwrap_or_default(),
        _ => return Err(MALFORMED_ARGS),
    };
    // The class's own function makes it, and what that would do is unknown.
    let unknown = || {
        let kind =
            format!("a {}, made by {}", class_name(arena, class), class_name(arena, function));
        Err(TensorError::UnsupportedKind { kind })
    };
    let view = wrapped_tensor(arena, function, args, wrappings).unwrap_or_else(unknown)?;
    check_attributes(arena, state)?;
    match arena.global(class) {
        Some((module, _)) if module == "torch" || module.starts_with("torch.") => Ok(view),
        _ => Ok(TensorView { class: Some(class_name(arena, class)), ..view }),
    }
}

/// torch's class for one rank's piece of a tensor, if this is one.
pub fn rank_piece_class((module, name): (&str, &str)) -> Option<&'static str> {
    let is_distributed = module.starts_with("torch.distributed");
    RANK_PIECE_CLASSES.into_iter().find(|class| is_distributed && *class == name)
}

/// Refuses attributes that, when set, give a tensor other values. torch never writes them.
fn check_attributes(arena: &Arena, state: NodeId) -> Result<(), TensorError> {
    // A dictionary, or a pair of dictionaries: one for attributes, one for slots.
    let parts = arena.items(state).unwrap_or(std::slice::from_ref(&state));
    if parts.len() > 2 {
        return Err(MALFORMED_ARGS);
    }
    for &part in parts {
        let entries = arena.entries(part).unwrap_or_default();
        if entries.len() > MAX_ATTRIBUTE_COUNT {
            return Err(MALFORMED_ARGS);
        }
        for &(name, _) in entries {
            if matches!(arena.text(name), Some("data" | "real" | "imag")) {
                return Err(TensorError::Modified);
            }
        }
    }
    Ok(())
}

/// Refuses a tensor whose metadata says that its values are not its bytes.
fn check_metadata(arena: &Arena, metadata: &[NodeId]) -> Result<(), TensorError> {
    let Some(&metadata) = metadata.first() else {
        return Ok(());
    };
    if let Node::None = arena.node(metadata) {
        return Ok(());
    }
    let entries =
        arena.entries(metadata).filter(|e| e.len() <= MAX_ATTRIBUTE_COUNT).ok_or(MALFORMED_ARGS)?;
    for &(key, flag) in entries {
        match (arena.text(key), arena.node(flag)) {
            (_, Node::Bool(false)) => {}
            (Some("conj"), _) => return Err(TensorError::LazyView { view: "conjugate" }),
            (Some("neg"), _) => return Err(TensorError::LazyView { view: "negative" }),
            _ => {
                return Err(TensorError::Malformed { what: "it has metadata of an unknown kind" });
            }
        }
    }
    Ok(())
}

fn typed_view(
    arena: &Arena,
    storage: NodeId,
    offset: NodeId,
    shape: NodeId,
    stride: NodeId,
) -> Result<TensorView<'_>, TensorError> {
    let view = untyped_view(arena, storage, offset, shape, stride)?;
    match &view.storage.dtype {
        Ok(dtype) => Ok(TensorView { dtype: *dtype, ..view }),
        Err(dtype) => Err(TensorError::UnsupportedDtype { dtype: (*dtype).to_owned() }),
    }
}

/// A view without its type: it stands as bytes until the caller sets the type.
fn untyped_view(
    arena: &Arena,
    id: NodeId,
    offset: NodeId,
    shape: NodeId,
    stride: NodeId,
) -> Result<TensorView<'_>, TensorError> {
    let storage = match arena.node(id) {
        Node::Persistent(key) if !arena.is_modified(id) => storage_ref(arena, key)?,
        _ => return Err(MALFORMED_ARGS),
    };
    if storage.is_meta {
        return Err(TensorError::UnsupportedKind {
            kind: "a tensor of the meta device, without values".to_owned(),
        });
    }
    Ok(TensorView {
        class: None,
        storage,
        dtype: Dtype::U8,
        offset: as_count(arena, offset).ok_or(MALFORMED_ARGS)?,
        shape: as_counts(arena, shape).ok_or(MALFORMED_ARGS)?,
        stride: as_counts(arena, stride).ok_or(MALFORMED_ARGS)?,
    })
}

/// The element type that a node names, such as `torch.float32`.
pub fn torch_dtype(arena: &Arena, id: NodeId) -> Result<Dtype, TensorError> {
    match arena.global(id) {
        Some(("torch", name)) => Dtype::from_torch_name(name).ok_or_else(|| {
            let dtype = shorten_name(name);
            match Dtype::is_unsupported_by_safetensors(name) {
                true => TensorError::UnsupportedDtype { dtype },
                false => TensorError::UnknownDtype { dtype },
            }
        }),
        _ => Err(MALFORMED_ARGS),
    }
}

/// A node as counts: a tuple, or a `torch.Size` of one. Not a list, which can change after the call.
pub fn as_counts(arena: &Arena, id: NodeId) -> Option<Vec<u64>> {
    let tuple = match arena.node(id) {
        Node::Tuple(_) => id,
        Node::Call(callable, args) if arena.global(callable) == Some(("torch", "Size")) => {
            match arena.items(args)? {
                &[tuple] if matches!(arena.node(tuple), Node::Tuple(_)) => tuple,
                _ => return None,
            }
        }
        _ => return None,
    };
    let items = arena.items(tuple)?;
    if items.len() > MAX_DIM_COUNT {
        return None;
    }
    items.iter().map(|&item| as_count(arena, item)).collect()
}
