//! Attributes of the objects in a pickle, as the pickle states them. No class is looked up.

use super::pickle::{Arena, Node, NodeId};

/// Module and name of the class of an object, or of the function whose call makes it.
pub fn class_of(arena: &Arena, id: NodeId) -> Option<(&str, &str)> {
    match arena.node(id) {
        Node::Call(class, _) => arena.global(class),
        _ => None,
    }
}

/// Maximum number of an object's attributes. Objects could share a state of millions, which each look-up would scan.
const MAX_ATTRIBUTE_COUNT: usize = 1000;

/// An attribute of an object. The object's state is a dictionary, or a pair: a dictionary, and one for slots.
pub fn attribute(arena: &Arena, object: NodeId, name: &str) -> Option<NodeId> {
    let state = arena.state(object)?;
    let entry = |arena: &Arena, state, name| {
        arena.entries(state).filter(|entries| entries.len() <= MAX_ATTRIBUTE_COUNT)?;
        entry(arena, state, name)
    };
    match arena.node(state) {
        Node::Tuple(_) => {
            let parts = arena.items(state).filter(|parts| parts.len() == 2)?;
            parts.iter().find_map(|&part| entry(arena, part, name))
        }
        _ => entry(arena, state, name),
    }
}

/// The value of a key in a dictionary. Of equal keys, the last one counts, as in Python.
pub fn entry(arena: &Arena, dictionary: NodeId, name: &str) -> Option<NodeId> {
    let entries = arena.entries(dictionary)?;
    entries.iter().rev().find(|(key, _)| arena.text(*key) == Some(name)).map(|(_, value)| *value)
}
