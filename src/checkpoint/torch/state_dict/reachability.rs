//! Finds out which values of a pickle have tensors or objects inside, at any depth.

use std::collections::HashSet;

use crate::checkpoint::torch::interpret::{PickleValue, interpret};
use crate::checkpoint::torch::names::key_text;
use crate::checkpoint::torch::pickle::{Arena, Node, NodeId};

use super::error::SelectError;

/// The bits of a value that was reached. An unreached value has none.
const REACHED: u8 = 1;
const TENSORS: u8 = 2;
const OBJECTS: u8 = 4;
/// Tensors that are not in the state of an optimizer.
const WEIGHTS: u8 = 8;
/// The state of an optimizer itself.
const OPTIMIZER: u8 = 16;

/// The deepest nesting of values. Python's own pickler reaches some hundred levels.
const MAX_DEPTH: usize = 10_000;

/// Maximum number of entries of an optimizer's state: torch writes two, and wrappers add a few.
const MAX_OPTIMIZER_ENTRY_COUNT: usize = 16;

/// The bits of every value, by its index in the arena.
pub struct Reachability(Vec<u8>);

impl Reachability {
    /// Visits every value that can be reached from `top`, each once.
    ///
    /// Refuses a dictionary of tensors in which two keys are equal. Python would take the last, and torch writes none.
    pub fn compute(arena: &Arena, top: NodeId) -> Result<Reachability, SelectError> {
        let mut reachability = Reachability(vec![0; arena.len()]);
        // Not by recursion: lists may be nested deeper than any stack.
        let mut open = vec![reachability.visit(arena, top)];
        loop {
            let depth = open.len();
            let Some(container) = open.last_mut() else { return Ok(reachability) };
            match container.next() {
                // A value inside itself is still open further out, and adds nothing here.
                Some(child) => match reachability.0[Arena::index(child)] {
                    0 if depth == MAX_DEPTH => return Err(SelectError::TooDeep),
                    0 => open.push(reachability.visit(arena, child)),
                    _ => reachability.merge_child(container.id, child),
                },
                None => {
                    let id = container.id;
                    open.pop();
                    if reachability.has_tensors(id) {
                        require_unique_keys(arena, id)?;
                    }
                    if let Some(outer) = open.last() {
                        reachability.merge_child(outer.id, id);
                    }
                }
            }
        }
    }

    /// Whether a value is a tensor or has one inside.
    pub fn has_tensors(&self, id: NodeId) -> bool {
        self.0[Arena::index(id)] & TENSORS != 0
    }

    /// Whether a value is or has a tensor outside of optimizer state.
    pub fn has_weights(&self, id: NodeId) -> bool {
        let bits = self.0[Arena::index(id)];
        bits & WEIGHTS != 0 && bits & OPTIMIZER == 0
    }

    /// Whether a value is the state of an optimizer, as torch writes it.
    pub fn is_optimizer(&self, id: NodeId) -> bool {
        self.0[Arena::index(id)] & OPTIMIZER != 0
    }

    /// Whether a value has neither a tensor nor an object inside.
    pub fn is_plain(&self, id: NodeId) -> bool {
        self.0[Arena::index(id)] & (TENSORS | OBJECTS) == 0
    }

    fn merge_child(&mut self, outer: NodeId, inner: NodeId) {
        let bits = self.0[Arena::index(inner)];
        let hidden = if bits & OPTIMIZER == 0 { 0 } else { WEIGHTS | OPTIMIZER };
        self.0[Arena::index(outer)] |= bits & !hidden;
    }

    /// Records the bits of a value itself, and opens it.
    fn visit<'a>(&mut self, arena: &'a Arena, id: NodeId) -> OpenContainer<'a> {
        let (bits, children) = match interpret(arena, id) {
            PickleValue::Tensor(_) => (TENSORS | WEIGHTS, Children::Items(&[])),
            PickleValue::Object(_) => (OBJECTS, Children::Items(&[])),
            PickleValue::Plain => (0, Children::Items(&[])),
            PickleValue::Entries(entries) => {
                let bits = if is_optimizer(arena, entries) { OPTIMIZER } else { 0 };
                (bits, Children::Entries(entries))
            }
            PickleValue::Items(items) => (0, Children::Items(items)),
        };
        self.0[Arena::index(id)] = REACHED | bits;
        OpenContainer { id, children, next_child: 0 }
    }
}

/// A value whose children are being visited.
struct OpenContainer<'a> {
    id: NodeId,
    children: Children<'a>,
    next_child: usize,
}

enum Children<'a> {
    Entries(&'a [(NodeId, NodeId)]),
    Items(&'a [NodeId]),
}

impl OpenContainer<'_> {
    fn next(&mut self) -> Option<NodeId> {
        let child = match self.children {
            Children::Entries(entries) => entries.get(self.next_child).map(|entry| entry.1),
            Children::Items(items) => items.get(self.next_child).copied(),
        };
        self.next_child += 1;
        child
    }
}

fn is_optimizer(arena: &Arena, entries: &[(NodeId, NodeId)]) -> bool {
    let has = |name| entries.iter().any(|&(key, _)| arena.text(key) == Some(name));
    entries.len() <= MAX_OPTIMIZER_ENTRY_COUNT && has("state") && has("param_groups")
}

fn require_unique_keys(arena: &Arena, id: NodeId) -> Result<(), SelectError> {
    let entries = arena.entries(id).unwrap_or_default();
    let (mut texts, mut numbers) = (HashSet::new(), HashSet::new());
    // A fraction can equal a whole number, and its value is not known.
    let mut has_fractions = false;
    for &(key, _) in entries {
        let is_new = match arena.node(key) {
            Node::Int(n) => numbers.insert(n),
            Node::Bool(flag) => numbers.insert(i64::from(flag)),
            Node::Plain => {
                has_fractions = true;
                true
            }
            _ => arena.text(key).is_none_or(|text| texts.insert(text)),
        };
        if !is_new || has_fractions && !numbers.is_empty() {
            return Err(SelectError::NameCollision {
                name: key_text(arena, key).unwrap_or("?".to_owned()),
                root: None,
            });
        }
    }
    Ok(())
}
