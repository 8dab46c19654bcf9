//! The values of a pickle as numbered nodes.
//!
//! A value that is used twice is one node with two users. So the arena grows by at most one node an opcode, whatever
//! the pickle does with its memo.

use std::collections::HashMap;

/// The longest text that can be the name of a key, a class or a storage. A longer text is a plain value: as a name, one
/// text in a thousand places would become a thousand texts.
const MAX_NAME_BYTES: usize = 4096;

/// The number of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(pub(super) u32);

/// A number without a node: an arena has fewer nodes.
pub(super) const NO_NODE: NodeId = NodeId(u32::MAX);

/// The place of a text, or of the items of a tuple, in the arena's pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSpan {
    pub(super) start: u32,
    pub(super) len: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    None,
    /// `True` or `False`.
    Bool(bool),
    /// A whole number that fits 64 bits.
    Int(i64),
    /// A longer whole number, little-endian.
    Long(PoolSpan),
    /// A fraction, a byte string, or another plain value that no tensor depends on.
    Plain,
    /// A text; not necessarily UTF-8, if Python 2 wrote it.
    Text(PoolSpan),
    Tuple(PoolSpan),
    /// A list: an index into the lists.
    List(u32),
    /// A dictionary: an index into the dictionaries.
    Dict(u32),
    /// A class or function by module and name, not looked up.
    Global(NodeId, NodeId),
    /// The result of calling the first with the second.
    Call(NodeId, NodeId),
    /// A value outside the pickle, by its key: torch's storages.
    Persistent(NodeId),
    /// A value that no reader needs to understand.
    Opaque(&'static str),
}

/// The kind of a node, stored apart from its two numbers: a node then takes 9 bytes instead of 24.
#[derive(Clone, Copy, Debug)]
enum NodeKind {
    None,
    Bool,
    Int,
    Long,
    Plain,
    Text,
    Tuple,
    List,
    Dict,
    Global,
    Call,
    Persistent,
    Opaque,
}

/// Bytes of a node.
const NODE_BYTES: usize = size_of::<NodeKind>() + size_of::<[u32; 2]>();

/// Bytes of an entry in the map of states.
const STATE_BYTES: usize = 16;

/// Bytes of a list or dictionary in addition to its items: its `Vec`, and the overhead of an allocation.
const CONTAINER_BYTES: usize = size_of::<Vec<NodeId>>() + 16;

/// The largest integer that has a shared node, however often it is used. A list of such integers takes no more than its
/// items.
const MAX_SHARED_INT: i64 = 0xffff;

/// The values of one pickle.
#[derive(Debug)]
pub struct Arena {
    kinds: Vec<NodeKind>,
    numbers: Vec<[u32; 2]>,
    text: Vec<u8>,
    items: Vec<NodeId>,
    lists: Vec<Vec<NodeId>>,
    dicts: Vec<Vec<(NodeId, NodeId)>>,
    /// The state that the pickle gives each value after it made it, by node number; [`NO_NODE`] if it gives several.
    states: HashMap<u32, NodeId>,
    /// Bytes of the items of lists and dictionaries.
    item_bytes: usize,
    /// The texts of opaque nodes, each once.
    opaque: Vec<&'static str>,
    /// The one node of each value without parts: `None`, `False`, `True`, [`Node::Plain`], the empty tuple.
    shared: [NodeId; 5],
    shared_ints: Vec<NodeId>,
}

impl Default for Arena {
    fn default() -> Self {
        Arena {
            kinds: Vec::new(),
            numbers: Vec::new(),
            text: Vec::new(),
            items: Vec::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            states: HashMap::new(),
            item_bytes: 0,
            opaque: Vec::new(),
            shared: [NO_NODE; 5],
            shared_ints: Vec::new(),
        }
    }
}

impl Arena {
    /// The node with a number.
    pub fn node(&self, id: NodeId) -> Node {
        let [first, second] = self.numbers[id.0 as usize];
        let span = PoolSpan { start: first, len: second };
        match self.kinds[id.0 as usize] {
            NodeKind::None => Node::None,
            NodeKind::Bool => Node::Bool(first != 0),
            NodeKind::Int => Node::Int((u64::from(second) << 32 | u64::from(first)) as i64),
            NodeKind::Long => Node::Long(span),
            NodeKind::Plain => Node::Plain,
            NodeKind::Text => Node::Text(span),
            NodeKind::Tuple => Node::Tuple(span),
            NodeKind::List => Node::List(first),
            NodeKind::Dict => Node::Dict(first),
            NodeKind::Global => Node::Global(NodeId(first), NodeId(second)),
            NodeKind::Call => Node::Call(NodeId(first), NodeId(second)),
            NodeKind::Persistent => Node::Persistent(NodeId(first)),
            NodeKind::Opaque => Node::Opaque(self.opaque[first as usize]),
        }
    }

    /// Bytes of memory that the values take.
    pub fn used_bytes(&self) -> usize {
        let containers = self.lists.len() + self.dicts.len();
        let nodes = self.kinds.len() * NODE_BYTES + self.states.len() * STATE_BYTES;
        let shared = self.shared_ints.len() * size_of::<NodeId>();
        let pools = self.text.len() + self.items.len() * size_of::<NodeId>() + shared;
        nodes + pools + containers * CONTAINER_BYTES + self.item_bytes
    }

    /// The number of nodes.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The index of a node, below [`Arena::len`].
    pub fn index(id: NodeId) -> usize {
        id.0 as usize
    }

    /// The text of a node, if it can be a name: UTF-8, and not longer than names are.
    pub fn text(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Text(span) if span.len as usize <= MAX_NAME_BYTES => {
                std::str::from_utf8(self.bytes(span)).ok()
            }
            _ => None,
        }
    }

    /// The bytes of a text or a long number.
    pub fn bytes(&self, span: PoolSpan) -> &[u8] {
        &self.text[span.start as usize..][..span.len as usize]
    }

    /// The items of a tuple or list.
    pub fn items(&self, id: NodeId) -> Option<&[NodeId]> {
        match self.node(id) {
            Node::Tuple(span) => Some(&self.items[span.start as usize..][..span.len as usize]),
            Node::List(list) => Some(&self.lists[list as usize]),
            _ => None,
        }
    }

    /// The entries of a dictionary.
    pub fn entries(&self, id: NodeId) -> Option<&[(NodeId, NodeId)]> {
        match self.node(id) {
            Node::Dict(dict) => Some(&self.dicts[dict as usize]),
            _ => None,
        }
    }

    /// All classes and functions, by module and name.
    pub fn globals(&self) -> impl Iterator<Item = (&str, &str)> {
        (0..self.kinds.len()).filter_map(|n| self.global(NodeId(n as u32)))
    }

    /// Module and name of a class or function.
    pub fn global(&self, id: NodeId) -> Option<(&str, &str)> {
        match self.node(id) {
            Node::Global(module, name) => Some((self.text(module)?, self.text(name)?)),
            _ => None,
        }
    }

    /// The keys of all values outside the pickle.
    pub fn persistent_keys(&self) -> impl Iterator<Item = NodeId> {
        (0..self.kinds.len() as u32).filter_map(|n| match self.node(NodeId(n)) {
            Node::Persistent(key) => Some(key),
            _ => None,
        })
    }

    /// Whether the pickle changes a value after it made it.
    pub fn is_modified(&self, id: NodeId) -> bool {
        self.states.contains_key(&id.0)
    }

    /// The state that the pickle gives a value: the attributes of an object. `None` if there is none, or more than one.
    pub fn state(&self, id: NodeId) -> Option<NodeId> {
        self.states.get(&id.0).copied().filter(|state| *state != NO_NODE)
    }

    pub(super) fn push(&mut self, node: Node) -> NodeId {
        let shared = match node {
            Node::None => &mut self.shared[0],
            Node::Bool(flag) => &mut self.shared[1 + usize::from(flag)],
            Node::Plain => &mut self.shared[3],
            Node::Tuple(PoolSpan { len: 0, .. }) => &mut self.shared[4],
            Node::Int(n @ 0..=MAX_SHARED_INT) => {
                let index = n as usize;
                if index >= self.shared_ints.len() {
                    self.shared_ints.resize(index + 1, NO_NODE);
                }
                &mut self.shared_ints[index]
            }
            _ => return self.push_new(node),
        };
        if *shared != NO_NODE {
            return *shared;
        }
        *shared = NodeId(self.kinds.len() as u32);
        self.push_new(node)
    }

    fn push_new(&mut self, node: Node) -> NodeId {
        let (kind, numbers) = match node {
            Node::None => (NodeKind::None, [0, 0]),
            Node::Bool(flag) => (NodeKind::Bool, [u32::from(flag), 0]),
            Node::Int(n) => (NodeKind::Int, [n as u32, (n as u64 >> 32) as u32]),
            Node::Long(span) => (NodeKind::Long, [span.start, span.len]),
            Node::Plain => (NodeKind::Plain, [0, 0]),
            Node::Text(span) => (NodeKind::Text, [span.start, span.len]),
            Node::Tuple(span) => (NodeKind::Tuple, [span.start, span.len]),
            Node::List(list) => (NodeKind::List, [list, 0]),
            Node::Dict(dict) => (NodeKind::Dict, [dict, 0]),
            Node::Global(module, name) => (NodeKind::Global, [module.0, name.0]),
            Node::Call(callable, args) => (NodeKind::Call, [callable.0, args.0]),
            Node::Persistent(key) => (NodeKind::Persistent, [key.0, 0]),
            Node::Opaque(what) => {
                let known = self.opaque.iter().position(|known| *known == what);
                let index = known.unwrap_or(self.opaque.len());
                if known.is_none() {
                    self.opaque.push(what);
                }
                (NodeKind::Opaque, [index as u32, 0])
            }
        };
        self.kinds.push(kind);
        self.numbers.push(numbers);
        NodeId(self.kinds.len() as u32 - 1)
    }

    pub(super) fn push_text(&mut self, text: &[u8]) -> NodeId {
        let span = self.store_bytes(text);
        self.push(Node::Text(span))
    }

    /// Stores bytes of the pickle in the pool. The length of a pickle fits 32 bits, and so do spans.
    pub(super) fn store_bytes(&mut self, bytes: &[u8]) -> PoolSpan {
        let span = PoolSpan { start: self.text.len() as u32, len: bytes.len() as u32 };
        self.text.extend_from_slice(bytes);
        span
    }

    pub(super) fn push_tuple(&mut self, items: &[NodeId]) -> NodeId {
        let span = PoolSpan { start: self.items.len() as u32, len: items.len() as u32 };
        self.items.extend_from_slice(items);
        self.push(Node::Tuple(span))
    }

    pub(super) fn push_list(&mut self, items: Vec<NodeId>) -> NodeId {
        self.item_bytes += size_of_val(&*items);
        self.lists.push(items);
        self.push(Node::List(self.lists.len() as u32 - 1))
    }

    pub(super) fn push_dict(&mut self, entries: Vec<(NodeId, NodeId)>) -> NodeId {
        self.item_bytes += size_of_val(&*entries);
        self.dicts.push(entries);
        self.push(Node::Dict(self.dicts.len() as u32 - 1))
    }

    pub(super) fn extend_list(&mut self, list: u32, items: &[NodeId]) {
        self.item_bytes += size_of_val(items);
        self.lists[list as usize].extend_from_slice(items);
    }

    pub(super) fn extend_dict(&mut self, dict: u32, pairs: &[(NodeId, NodeId)]) {
        self.item_bytes += size_of_val(pairs);
        self.dicts[dict as usize].extend_from_slice(pairs);
    }

    /// Records a change that is not a state.
    pub(super) fn mark_modified(&mut self, id: NodeId) {
        self.states.insert(id.0, NO_NODE);
    }

    pub(super) fn set_state(&mut self, id: NodeId, state: NodeId) {
        self.states.entry(id.0).and_modify(|state| *state = NO_NODE).or_insert(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pushed_node_reads_back_unchanged() {
        let (a, b, span) = (NodeId(7), NodeId(u32::MAX), PoolSpan { start: 3, len: u32::MAX });
        let ints = [0, 1, 255, 0xffff, 0x1_0000, -1, i64::MIN, i64::MAX].map(Node::Int);
        let others = [
            Node::None,
            Node::Bool(false),
            Node::Bool(true),
            Node::Long(span),
            Node::Plain,
            Node::Text(span),
            Node::Tuple(span),
            Node::Tuple(PoolSpan { start: 9, len: 1 }),
            Node::List(5),
            Node::Dict(6),
            Node::Global(a, b),
            Node::Call(b, a),
            Node::Persistent(b),
            Node::Opaque("one"),
            Node::Opaque("another"),
        ];
        let mut arena = Arena::default();
        let nodes: Vec<Node> = ints.into_iter().chain(others).collect();
        let ids: Vec<NodeId> = nodes.iter().map(|&node| arena.push(node)).collect();
        for (id, node) in ids.iter().zip(&nodes) {
            assert_eq!(arena.node(*id), *node);
        }
        // Values without parts share one node.
        let len = arena.len();
        let shared = [Node::None, Node::Bool(true), Node::Plain, Node::Int(0), Node::Int(0xffff)];
        for node in shared {
            let id = arena.push(node);
            assert_eq!((arena.node(id), arena.len()), (node, len));
        }
    }
}
