//! What the nodes of a pickle mean: which calls make a tensor, which values are plain, and which
//! are objects that only executing the pickle would make.

use crate::checkpoint::{Dtype, TensorError};

use super::pickle::{Arena, Node, NodeId};

/// What a node stands for.
pub enum PickleValue<'a> {
    /// A dictionary.
    Entries(&'a [(NodeId, NodeId)]),
    /// A list or tuple.
    Items(&'a [NodeId]),
    /// A tensor, or why it cannot be shown.
    Tensor(Result<TensorView<'a>, TensorError>),
    /// A number, text and the like.
    Plain,
    /// An object, by its class.
    Object(String),
}

/// A tensor as torch describes it: a window onto a storage. Counts are in elements.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// Its class, where it is one that a library adds to torch's own.
    pub class: Option<String>,
    pub storage: StorageRef<'a>,
    pub dtype: Dtype,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub stride: Vec<u64>,
}

/// A storage as a tensor refers to it.
#[derive(Clone, Debug)]
pub struct StorageRef<'a> {
    /// Its name in the file.
    pub key: &'a str,
    /// Bytes of one of its elements.
    pub element_bytes: u64,
    /// Its type, unless it is one that safetensors does not have.
    pub dtype: Result<Dtype, &'static str>,
    /// How many elements it states.
    pub element_count: u64,
    /// The part that is seen, in elements: older files have storages that are windows themselves.
    pub window: Option<(u64, u64)>,
    /// Whether it is on the meta device, and so has no bytes.
    pub is_meta: bool,
}

/// torch's own limit on dimensions.
const MAX_DIM_COUNT: usize = 64;

/// Attributes of one tensor; they are looked through for each tensor that has them.
const MAX_ATTRIBUTE_COUNT: usize = 256;

/// Wrappings of one tensor inside another; torch never writes more than two.
const MAX_WRAPPING_COUNT: usize = 8;

/// What a node stands for.
pub fn value(arena: &Arena, id: NodeId) -> PickleValue<'_> {
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
            if let Some(tensor) = tensor_of_call(arena, callable, args, MAX_WRAPPING_COUNT) {
                let modified = arena.is_modified(id);
                return PickleValue::Tensor(if modified {
                    Err(TensorError::Modified)
                } else {
                    tensor
                });
            }
            match arena.global(callable) {
                Some(call) if is_plain_call(call) => PickleValue::Plain,
                _ => PickleValue::Object(class_name(arena, callable)),
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
        || ["bits", "int", "uint", "qint", "quint", "complex", "bcomplex"]
            .into_iter()
            .any(is_numbered)
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

/// Calls that give a number, a text or a set of them.
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

/// Characters of a class or storage that are shown; real ones are shorter.
const MAX_NAME_CHARS: usize = 200;

/// The front of a name, for a message: a hundred thousand messages may have the same long one.
pub fn shorten_name(name: &str) -> String {
    name.chars().take(MAX_NAME_CHARS).collect()
}

/// `module.name` of a class or function, and of whatever else stands in its place.
pub fn class_name(arena: &Arena, id: NodeId) -> String {
    match arena.node(id) {
        Node::Global(..) => match arena.global(id) {
            Some((module, name)) => shorten_name(&format!("{module}.{name}")),
            None => "unnamed".to_owned(),
        },
        Node::Call(callable, _)
            if matches!(arena.node(callable), Node::Global(..) | Node::Persistent(_)) =>
        {
            class_name(arena, callable)
        }
        // The older form keeps a model's class outside the pickle: `('module', class, file, source)`.
        Node::Persistent(key) => match arena.items(key) {
            Some(&[kind, class, ..])
                if arena.text(kind) == Some("module") && arena.global(class).is_some() =>
            {
                class_name(arena, class)
            }
            _ => "unknown".to_owned(),
        },
        _ => "unknown".to_owned(),
    }
}

const MALFORMED_ARGS: TensorError =
    TensorError::Malformed { what: "its arguments are not those that torch writes" };

/// The tensor that a call makes; `None` if the call is not one that makes tensors.
fn tensor_of_call<'a>(
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
                tensor_of_call(arena, callable, args, wrappings - 1).unwrap_or(Err(MALFORMED_ARGS))
            }
            _ => Err(MALFORMED_ARGS),
        }
    };
    match (name, args) {
        ("_rebuild_tensor", &[storage, offset, shape, stride]) => {
            Some(typed_view(arena, storage, offset, shape, stride))
        }
        // Then: requires_grad, backward_hooks and, in newer files, metadata.
        ("_rebuild_tensor_v2", &[storage, offset, shape, stride, _, _, ref metadata @ ..])
            if metadata.len() <= 1 =>
        {
            Some(
                check_metadata(arena, metadata)
                    .and_then(|()| typed_view(arena, storage, offset, shape, stride)),
            )
        }
        // Then: requires_grad, backward_hooks, dtype and, in newer files, metadata.
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
        // What to call, the class of the result, the arguments, the attributes of the result.
        ("_rebuild_from_type_v2" | "_rebuild_from_type", &[function, class, args, state]) => {
            Some(subclass_view(arena, function, class, args, state, wrappings))
        }
        ("_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor", _) => kind("a sparse tensor"),
        ("_rebuild_qtensor", _) => kind("a quantised tensor"),
        ("_rebuild_nested_tensor", _) => kind("a nested tensor"),
        ("_rebuild_meta_tensor_no_storage", _) => {
            kind("a tensor of the meta device, without values")
        }
        ("_rebuild_wrapper_subclass", _) => kind("a tensor that wraps others"),
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

/// A tensor of another class: what to call with which arguments, the class, its attributes.
fn subclass_view<'a>(
    arena: &'a Arena,
    function: NodeId,
    class: NodeId,
    args: NodeId,
    state: NodeId,
    wrappings: usize,
) -> Result<TensorView<'a>, TensorError> {
    let left = wrappings.checked_sub(1).ok_or(MALFORMED_ARGS)?;
    let args = match arena.node(args) {
        Node::Tuple(_) => arena.items(args).unwrap_or_default(),
        _ => return Err(MALFORMED_ARGS),
    };
    // A function of its own makes it: what that would do is not known.
    let unknown = || {
        let kind =
            format!("a {}, made by {}", class_name(arena, class), class_name(arena, function));
        Err(TensorError::UnsupportedKind { kind })
    };
    let view = tensor_of_call(arena, function, args, left).unwrap_or_else(unknown)?;
    check_attributes(arena, state)?;
    match arena.global(class) {
        Some((module, _)) if module == "torch" || module.starts_with("torch.") => Ok(view),
        _ => Ok(TensorView { class: Some(class_name(arena, class)), ..view }),
    }
}

/// Refuses attributes that, when set, give a tensor other values. torch never writes them.
fn check_attributes(arena: &Arena, state: NodeId) -> Result<(), TensorError> {
    // A dictionary, or a pair of one for attributes and one for slots.
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

/// A view whose type is still to be said; until then it is bytes.
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

/// A storage from its persistent id:
/// `('storage', class, key, location, count)` and, in the older form, a window onto it.
pub fn storage_ref(arena: &Arena, id: NodeId) -> Result<StorageRef<'_>, TensorError> {
    let malformed = || TensorError::Malformed { what: "its storage is not named as torch does it" };
    let fields = match arena.node(id) {
        Node::Tuple(_) => arena.items(id).unwrap_or_default(),
        _ => return Err(malformed()),
    };
    let (&[kind, class, key, location, size], rest) =
        fields.split_first_chunk().ok_or_else(malformed)?;
    if arena.text(kind) != Some("storage") {
        return Err(malformed());
    }
    let (unit, dtype) = match arena.global(class) {
        Some(("torch" | "torch.cuda" | "torch.storage", name)) => {
            storage_element(name).ok_or_else(malformed)?
        }
        _ => return Err(malformed()),
    };
    let window = match rest {
        [] => None,
        &[window] => match (arena.node(window), arena.items(window)) {
            (Node::None, _) => None,
            // The name of the window, its first element, how many.
            (Node::Tuple(_), Some(&[_, first, len])) => Some((
                as_count(arena, first).ok_or_else(malformed)?,
                as_count(arena, len).ok_or_else(malformed)?,
            )),
            _ => return Err(malformed()),
        },
        _ => return Err(malformed()),
    };
    Ok(StorageRef {
        key: arena.text(key).ok_or_else(malformed)?,
        element_bytes: unit,
        dtype,
        element_count: as_count(arena, size).ok_or_else(malformed)?,
        window,
        is_meta: arena.text(location) == Some("meta"),
    })
}

/// Bytes of an element, and its type or torch's name for a type that safetensors does not have.
fn storage_element(name: &str) -> Option<(u64, Result<Dtype, &'static str>)> {
    if let Some(dtype) = Dtype::from_storage_class(name) {
        return Some((u64::from(dtype.bits() / 8), Ok(dtype)));
    }
    let other = |unit, name| Some((unit, Err(name)));
    match name {
        "UntypedStorage" | "_UntypedStorage" => Some((1, Ok(Dtype::U8))),
        "ComplexDoubleStorage" => other(16, "complex128"),
        "QInt8Storage" => other(1, "qint8"),
        "QUInt8Storage" => other(1, "quint8"),
        "QInt32Storage" => other(4, "qint32"),
        "QUInt4x2Storage" => other(1, "quint4x2"),
        "QUInt2x4Storage" => other(1, "quint2x4"),
        _ => None,
    }
}

fn torch_dtype(arena: &Arena, id: NodeId) -> Result<Dtype, TensorError> {
    match arena.global(id) {
        Some(("torch", name)) => Dtype::from_torch_name(name)
            .ok_or_else(|| TensorError::UnsupportedDtype { dtype: name.to_owned() }),
        _ => Err(MALFORMED_ARGS),
    }
}

/// The name of a key: text as it is, whole numbers by their digits.
pub fn key_text(arena: &Arena, key: NodeId) -> Option<String> {
    match arena.node(key) {
        Node::Int(n) => Some(n.to_string()),
        _ => arena.text(key).map(str::to_owned),
    }
}

fn as_count(arena: &Arena, id: NodeId) -> Option<u64> {
    match arena.node(id) {
        Node::Int(n) => u64::try_from(n).ok(),
        _ => None,
    }
}

/// A tuple of counts, or a `torch.Size` of one. Not a list: a list can change after the call.
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
