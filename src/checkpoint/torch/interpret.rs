//! What the nodes of a pickle mean: which calls make a tensor, which values are plain, and which
//! are objects that only executing the pickle would make.

use crate::checkpoint::{Dtype, TensorFault};

use super::pickle::{Arena, Id, Node};

/// What a node stands for.
pub enum Value<'a> {
    /// A dictionary.
    Entries(&'a [(Id, Id)]),
    /// A list or tuple.
    Items(&'a [Id]),
    /// A tensor, or why it cannot be shown.
    Tensor(Result<View<'a>, TensorFault>),
    /// A number, text and the like.
    Plain,
    /// An object, by its class.
    Opaque(String),
}

/// A tensor as torch describes it: a window onto a storage. Counts are in elements.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// Its class, where it is one that a library adds to torch's own.
    pub class: Option<String>,
    pub storage: Storage<'a>,
    pub dtype: Dtype,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub stride: Vec<u64>,
}

/// A storage as a tensor refers to it.
#[derive(Clone, Debug)]
pub struct Storage<'a> {
    /// Its name in the file.
    pub key: &'a str,
    /// Bytes of one of its elements.
    pub unit: u64,
    /// Its type, unless it is one that safetensors does not have.
    pub dtype: Result<Dtype, &'static str>,
    /// How many elements it states.
    pub count: u64,
    /// The part that is seen, in elements: older files have storages that are windows themselves.
    pub window: Option<(u64, u64)>,
    /// Whether it is on the meta device, and so has no bytes.
    pub meta: bool,
}

/// torch's own limit on dimensions.
const MAX_DIMS: usize = 64;

/// Attributes of one tensor; they are looked through for each tensor that has them.
const MAX_ATTRIBUTES: usize = 256;

/// Wrappings of one tensor inside another; torch never writes more than two.
const MAX_WRAPPINGS: usize = 8;

/// What a node stands for.
pub fn value(arena: &Arena, id: Id) -> Value<'_> {
    match arena.node(id) {
        Node::None | Node::Bool(_) | Node::Int(_) | Node::Long(_) | Node::Plain | Node::Text(_) => {
            Value::Plain
        }
        Node::Tuple(_) | Node::List(_) => Value::Items(arena.items(id).unwrap_or_default()),
        Node::Dict(_) => Value::Entries(arena.entries(id).unwrap_or_default()),
        Node::Persistent(_) => Value::Opaque("torch storage".to_owned()),
        Node::Opaque(what) => Value::Opaque(what.to_owned()),
        Node::Global(..) => match arena.global(id) {
            Some(("torch", name)) if is_torch_constant(name) => Value::Plain,
            _ => Value::Opaque(class_name(arena, id)),
        },
        Node::Call(callable, args) => {
            let args = arena.items(args).unwrap_or_default();
            if let Some(tensor) = rebuild(arena, callable, args, MAX_WRAPPINGS) {
                let modified = arena.is_modified(id);
                return Value::Tensor(if modified { Err(TensorFault::Modified) } else { tensor });
            }
            match arena.global(callable) {
                Some(call) if makes_plain_value(call) => Value::Plain,
                _ => Value::Opaque(class_name(arena, callable)),
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
    Dtype::from_torch(name).is_some()
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
fn makes_plain_value(call: (&str, &str)) -> bool {
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
const SHOWN: usize = 200;

/// The front of a name, for a message: a hundred thousand messages may have the same long one.
pub fn shown(name: &str) -> String {
    name.chars().take(SHOWN).collect()
}

/// `module.name` of a class or function, and of whatever else stands in its place.
pub fn class_name(arena: &Arena, id: Id) -> String {
    match arena.node(id) {
        Node::Global(..) => match arena.global(id) {
            Some((module, name)) => shown(&format!("{module}.{name}")),
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

const MALFORMED_ARGS: TensorFault =
    TensorFault::Malformed { what: "its arguments are not those that torch writes" };

/// The tensor that a call makes; `None` if the call is not one that makes tensors.
fn rebuild<'a>(
    arena: &'a Arena,
    callable: Id,
    args: &[Id],
    wrappings: usize,
) -> Option<Result<View<'a>, TensorFault>> {
    let kind = |what: &str| Some(Err(TensorFault::Kind { kind: what.to_owned() }));
    let (module, name) = arena.global(callable)?;
    if !matches!(module, "torch._utils" | "torch._tensor" | "torch") {
        return None;
    }
    let within = |id: Id| {
        if wrappings == 0 {
            return Err(MALFORMED_ARGS);
        }
        if arena.is_modified(id) {
            return Err(TensorFault::Modified);
        }
        match arena.node(id) {
            Node::Call(callable, args) => {
                let args = arena.items(args).unwrap_or_default();
                rebuild(arena, callable, args, wrappings - 1).unwrap_or(Err(MALFORMED_ARGS))
            }
            _ => Err(MALFORMED_ARGS),
        }
    };
    match (name, args) {
        ("_rebuild_tensor", &[storage, offset, shape, stride]) => {
            Some(view(arena, storage, offset, shape, stride))
        }
        // Then: requires_grad, backward_hooks and, in newer files, metadata.
        ("_rebuild_tensor_v2", &[storage, offset, shape, stride, _, _, ref metadata @ ..])
            if metadata.len() <= 1 =>
        {
            Some(
                values_are_bytes(arena, metadata)
                    .and_then(|()| view(arena, storage, offset, shape, stride)),
            )
        }
        // Then: requires_grad, backward_hooks, dtype and, in newer files, metadata.
        (
            "_rebuild_tensor_v3",
            &[storage, offset, shape, stride, _, _, dtype, ref metadata @ ..],
        ) if metadata.len() <= 1 => Some(values_are_bytes(arena, metadata).and_then(|()| {
            let dtype = dtype_of(arena, dtype)?;
            Ok(View { dtype, ..untyped_view(arena, storage, offset, shape, stride)? })
        })),
        ("_rebuild_parameter", &[data, _, _]) => Some(within(data)),
        ("_rebuild_parameter_with_state", &[data, _, _, state]) => {
            Some(leaves_values_alone(arena, state).and_then(|()| within(data)))
        }
        // What to call, the class of the result, the arguments, the attributes of the result.
        ("_rebuild_from_type_v2" | "_rebuild_from_type", &[function, class, args, state]) => {
            Some(subclass(arena, function, class, args, state, wrappings))
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
fn subclass<'a>(
    arena: &'a Arena,
    function: Id,
    class: Id,
    args: Id,
    state: Id,
    wrappings: usize,
) -> Result<View<'a>, TensorFault> {
    let left = wrappings.checked_sub(1).ok_or(MALFORMED_ARGS)?;
    let args = match arena.node(args) {
        Node::Tuple(_) => arena.items(args).unwrap_or_default(),
        _ => return Err(MALFORMED_ARGS),
    };
    // A function of its own makes it: what that would do is not known.
    let unknown = || {
        let kind =
            format!("a {}, made by {}", class_name(arena, class), class_name(arena, function));
        Err(TensorFault::Kind { kind })
    };
    let view = rebuild(arena, function, args, left).unwrap_or_else(unknown)?;
    leaves_values_alone(arena, state)?;
    match arena.global(class) {
        Some((module, _)) if module == "torch" || module.starts_with("torch.") => Ok(view),
        _ => Ok(View { class: Some(class_name(arena, class)), ..view }),
    }
}

/// Refuses attributes that, when set, give a tensor other values. torch never writes them.
fn leaves_values_alone(arena: &Arena, state: Id) -> Result<(), TensorFault> {
    // A dictionary, or a pair of one for attributes and one for slots.
    let parts = arena.items(state).unwrap_or(std::slice::from_ref(&state));
    if parts.len() > 2 {
        return Err(MALFORMED_ARGS);
    }
    for &part in parts {
        let entries = arena.entries(part).unwrap_or_default();
        if entries.len() > MAX_ATTRIBUTES {
            return Err(MALFORMED_ARGS);
        }
        for &(name, _) in entries {
            if matches!(arena.text(name), Some("data" | "real" | "imag")) {
                return Err(TensorFault::Modified);
            }
        }
    }
    Ok(())
}

/// Refuses a tensor whose metadata says that its values are not its bytes.
fn values_are_bytes(arena: &Arena, metadata: &[Id]) -> Result<(), TensorFault> {
    let Some(&metadata) = metadata.first() else {
        return Ok(());
    };
    if let Node::None = arena.node(metadata) {
        return Ok(());
    }
    let entries =
        arena.entries(metadata).filter(|e| e.len() <= MAX_ATTRIBUTES).ok_or(MALFORMED_ARGS)?;
    for &(key, flag) in entries {
        match (arena.text(key), arena.node(flag)) {
            (_, Node::Bool(false)) => {}
            (Some("conj"), _) => return Err(TensorFault::LazyView { view: "conjugate" }),
            (Some("neg"), _) => return Err(TensorFault::LazyView { view: "negative" }),
            _ => {
                return Err(TensorFault::Malformed { what: "it has metadata of an unknown kind" });
            }
        }
    }
    Ok(())
}

fn view(
    arena: &Arena,
    storage: Id,
    offset: Id,
    shape: Id,
    stride: Id,
) -> Result<View<'_>, TensorFault> {
    let view = untyped_view(arena, storage, offset, shape, stride)?;
    match &view.storage.dtype {
        Ok(dtype) => Ok(View { dtype: *dtype, ..view }),
        Err(dtype) => Err(TensorFault::Dtype { dtype: (*dtype).to_owned() }),
    }
}

/// A view whose type is still to be said; until then it is bytes.
fn untyped_view(
    arena: &Arena,
    id: Id,
    offset: Id,
    shape: Id,
    stride: Id,
) -> Result<View<'_>, TensorFault> {
    let storage = match arena.node(id) {
        Node::Persistent(key) if !arena.is_modified(id) => storage(arena, key)?,
        _ => return Err(MALFORMED_ARGS),
    };
    if storage.meta {
        return Err(TensorFault::Kind {
            kind: "a tensor of the meta device, without values".to_owned(),
        });
    }
    Ok(View {
        class: None,
        storage,
        dtype: Dtype::U8,
        offset: count(arena, offset).ok_or(MALFORMED_ARGS)?,
        shape: counts(arena, shape).ok_or(MALFORMED_ARGS)?,
        stride: counts(arena, stride).ok_or(MALFORMED_ARGS)?,
    })
}

/// A storage from its persistent id:
/// `('storage', class, key, location, count)` and, in the older form, a window onto it.
pub fn storage(arena: &Arena, id: Id) -> Result<Storage<'_>, TensorFault> {
    let malformed = || TensorFault::Malformed { what: "its storage is not named as torch does it" };
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
            storage_class(name).ok_or_else(malformed)?
        }
        _ => return Err(malformed()),
    };
    let window = match rest {
        [] => None,
        &[window] => match (arena.node(window), arena.items(window)) {
            (Node::None, _) => None,
            // The name of the window, its first element, how many.
            (Node::Tuple(_), Some(&[_, first, len])) => Some((
                count(arena, first).ok_or_else(malformed)?,
                count(arena, len).ok_or_else(malformed)?,
            )),
            _ => return Err(malformed()),
        },
        _ => return Err(malformed()),
    };
    Ok(Storage {
        key: arena.text(key).ok_or_else(malformed)?,
        unit,
        dtype,
        count: count(arena, size).ok_or_else(malformed)?,
        window,
        meta: arena.text(location) == Some("meta"),
    })
}

/// Bytes of an element, and its type or torch's name for a type that safetensors does not have.
fn storage_class(name: &str) -> Option<(u64, Result<Dtype, &'static str>)> {
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

fn dtype_of(arena: &Arena, id: Id) -> Result<Dtype, TensorFault> {
    match arena.global(id) {
        Some(("torch", name)) => {
            Dtype::from_torch(name).ok_or_else(|| TensorFault::Dtype { dtype: name.to_owned() })
        }
        _ => Err(MALFORMED_ARGS),
    }
}

/// The name of a key: text as it is, whole numbers by their digits.
pub fn key_text(arena: &Arena, key: Id) -> Option<String> {
    match arena.node(key) {
        Node::Int(n) => Some(n.to_string()),
        _ => arena.text(key).map(str::to_owned),
    }
}

fn count(arena: &Arena, id: Id) -> Option<u64> {
    match arena.node(id) {
        Node::Int(n) => u64::try_from(n).ok(),
        _ => None,
    }
}

/// A tuple of counts, or a `torch.Size` of one. Not a list: a list can change after the call.
pub fn counts(arena: &Arena, id: Id) -> Option<Vec<u64>> {
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
    if items.len() > MAX_DIMS {
        return None;
    }
    items.iter().map(|&item| count(arena, item)).collect()
}
