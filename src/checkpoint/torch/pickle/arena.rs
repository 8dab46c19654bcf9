//! The values of a pickle, numbered. A value that is used twice is one node with two users, so the
//! arena grows by at most one node an opcode, whatever the pickle does with its memo.

use std::collections::HashSet;

/// The longest text that names something: a key, a class, a storage. A longer one is a plain value;
/// were it taken for a name, one text in a thousand places would be a thousand texts.
pub const MAX_NAME: usize = 4096;

/// The number of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id(pub(super) u32);

/// Where a text, or the items of a tuple, lie in the arena's pools.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub(super) start: u32,
    pub(super) len: u32,
}

/// One value.
#[derive(Clone, Copy, Debug)]
pub enum Node {
    /// `None`.
    None,
    /// `True`, `False`.
    Bool(bool),
    /// A whole number that fits.
    Int(i64),
    /// A whole number that does not, little-endian.
    Long(Span),
    /// A number of another kind, a byte string, or another plain value that no tensor depends on.
    Plain,
    /// Text; not necessarily valid UTF-8 where a Python 2 wrote it.
    Text(Span),
    /// A tuple.
    Tuple(Span),
    /// A list: an index into the lists.
    List(u32),
    /// A dictionary: an index into the dictionaries.
    Dict(u32),
    /// A class or function by module and name, not looked up.
    Global(Id, Id),
    /// What calling the first with the second would give.
    Call(Id, Id),
    /// What the program that wrote it keeps outside the pickle: torch's storages.
    Persistent(Id),
    /// Something that nobody here needs to understand.
    Opaque(&'static str),
}

/// The values of one pickle.
#[derive(Debug, Default)]
pub struct Arena {
    nodes: Vec<Node>,
    text: Vec<u8>,
    items: Vec<Id>,
    lists: Vec<Vec<Id>>,
    dicts: Vec<Vec<(Id, Id)>>,
    modified: HashSet<u32>,
}

impl Arena {
    /// The value of a number.
    pub fn node(&self, id: Id) -> Node {
        self.nodes[id.0 as usize]
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The number as an index, below [`Arena::len`].
    pub fn place(id: Id) -> usize {
        id.0 as usize
    }

    /// The text of a node, if it can be a name: valid UTF-8, and no longer than names are.
    pub fn text(&self, id: Id) -> Option<&str> {
        match self.node(id) {
            Node::Text(span) if span.len as usize <= MAX_NAME => {
                std::str::from_utf8(self.bytes(span)).ok()
            }
            _ => None,
        }
    }

    /// The bytes of a text or a long number.
    pub fn bytes(&self, span: Span) -> &[u8] {
        &self.text[span.start as usize..][..span.len as usize]
    }

    /// The items of a tuple or list.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Tuple(span) => Some(&self.items[span.start as usize..][..span.len as usize]),
            Node::List(list) => Some(&self.lists[list as usize]),
            _ => None,
        }
    }

    /// The entries of a dictionary.
    pub fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(dict) => Some(&self.dicts[dict as usize]),
            _ => None,
        }
    }

    /// Module and name of a class or function.
    pub fn global(&self, id: Id) -> Option<(&str, &str)> {
        match self.node(id) {
            Node::Global(module, name) => Some((self.text(module)?, self.text(name)?)),
            _ => None,
        }
    }

    /// The keys of everything that the pickle keeps outside itself.
    pub fn persistent_keys(&self) -> impl Iterator<Item = Id> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Persistent(key) => Some(*key),
            _ => None,
        })
    }

    /// Whether the pickle does something to the value after it made it.
    pub fn is_modified(&self, id: Id) -> bool {
        self.modified.contains(&id.0)
    }

    pub(super) fn push(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        Id(self.nodes.len() as u32 - 1)
    }

    pub(super) fn push_text(&mut self, text: &[u8]) -> Id {
        let span = self.span_of(text);
        self.push(Node::Text(span))
    }

    /// Keeps bytes in the pool. What is kept comes from the pickle, whose size fits 32 bits.
    pub(super) fn span_of(&mut self, bytes: &[u8]) -> Span {
        let span = Span { start: self.text.len() as u32, len: bytes.len() as u32 };
        self.text.extend_from_slice(bytes);
        span
    }

    pub(super) fn push_tuple(&mut self, items: &[Id]) -> Id {
        let span = Span { start: self.items.len() as u32, len: items.len() as u32 };
        self.items.extend_from_slice(items);
        self.push(Node::Tuple(span))
    }

    pub(super) fn push_list(&mut self, items: Vec<Id>) -> Id {
        self.lists.push(items);
        self.push(Node::List(self.lists.len() as u32 - 1))
    }

    pub(super) fn push_dict(&mut self, entries: Vec<(Id, Id)>) -> Id {
        self.dicts.push(entries);
        self.push(Node::Dict(self.dicts.len() as u32 - 1))
    }

    pub(super) fn extend_list(&mut self, list: u32, items: &[Id]) {
        self.lists[list as usize].extend_from_slice(items);
    }

    pub(super) fn extend_dict(&mut self, dict: u32, pairs: impl Iterator<Item = (Id, Id)>) {
        self.dicts[dict as usize].extend(pairs);
    }

    pub(super) fn mark_modified(&mut self, id: Id) {
        self.modified.insert(id.0);
    }
}
