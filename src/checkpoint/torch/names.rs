//! Names of values in a pickle: keys, classes, storages.

use super::pickle::{Arena, Node, NodeId};

/// Maximum length of a class or storage in a message; real names are shorter.
const MAX_NAME_CHARS: usize = 200;

/// Shortens a name for a message: a hundred thousand messages may have the same long name.
pub fn shorten_name(name: &str) -> String {
    name.chars().take(MAX_NAME_CHARS).collect()
}

/// The text of a key: text as it is, whole numbers as digits.
pub fn key_text(arena: &Arena, key: NodeId) -> Option<String> {
    match arena.node(key) {
        Node::Int(n) => Some(n.to_string()),
        _ => arena.text(key).map(str::to_owned),
    }
}

/// The class of an object or function as `module.name`, for messages.
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
