//! Which values of a pickle have tensors or objects in them, however deep.

use std::collections::HashSet;

use super::interpret::{self, PickleValue, key_text};
use super::pickle::{Arena, Node, NodeId};
use super::select_error::SelectError;

/// Per value: 0 where it was not reached, else bits.
const REACHED: u8 = 1;
const TENSORS: u8 = 2;
const OBJECTS: u8 = 4;
/// Tensors that are not in the state of an optimizer.
const WEIGHTS: u8 = 8;
/// The state of an optimizer itself.
const OPTIMIZER: u8 = 16;

/// The deepest nesting of values. Python's own pickler reaches some hundred levels.
const MAX_DEPTH: usize = 10_000;

/// The most entries of an optimizer's state: torch writes two, and wrappers add a few.
const MAX_OPTIMIZER_ENTRIES: usize = 16;

/// The answers for every value that can be reached.
pub struct Reachability(Vec<u8>);

impl Reachability {
    /// Asks everything that can be reached from `top`, each value once. Refuses a dictionary with
    /// tensors in which two keys are equal: Python would take the last, and torch writes no such.
    pub fn compute(arena: &Arena, top: NodeId) -> Result<Reachability, SelectError> {
        let mut census = Reachability(vec![0; arena.len()]);
        // Not by recursion: lists may be nested deeper than any stack, where nobody looks for tensors.
        let mut open = vec![census.visit(arena, top)];
        loop {
            let depth = open.len();
            let Some(container) = open.last_mut() else { return Ok(census) };
            match container.next() {
                // A value inside itself is being answered further out: it adds nothing here.
                Some(child) => match census.0[Arena::index(child)] {
                    0 if depth == MAX_DEPTH => return Err(SelectError::TooDeep),
                    0 => open.push(census.visit(arena, child)),
                    _ => census.merge_child(container.id, child),
                },
                None => {
                    let id = container.id;
                    open.pop();
                    if census.has_tensors(id) {
                        require_unique_keys(arena, id)?;
                    }
                    if let Some(outer) = open.last() {
                        census.merge_child(outer.id, id);
                    }
                }
            }
        }
    }

    /// Whether it is a tensor or has one inside.
    pub fn has_tensors(&self, id: NodeId) -> bool {
        self.0[Arena::index(id)] & TENSORS != 0
    }

    /// Whether it is or contains a tensor outside of optimizer state.
    pub fn has_weights(&self, id: NodeId) -> bool {
        let bits = self.0[Arena::index(id)];
        bits & WEIGHTS != 0 && bits & OPTIMIZER == 0
    }

    /// Whether it is the state of an optimizer, as torch writes it.
    pub fn is_optimizer(&self, id: NodeId) -> bool {
        self.0[Arena::index(id)] & OPTIMIZER != 0
    }

    /// Whether there is neither a tensor nor an object in it.
    pub fn is_plain(&self, id: NodeId) -> bool {
        self.0[Arena::index(id)] & (TENSORS | OBJECTS) == 0
    }

    fn merge_child(&mut self, outer: NodeId, inner: NodeId) {
        let bits = self.0[Arena::index(inner)];
        let hidden = if bits & OPTIMIZER == 0 { 0 } else { WEIGHTS | OPTIMIZER };
        self.0[Arena::index(outer)] |= bits & !hidden;
    }

    /// Notes what a value is, and opens it.
    fn visit<'a>(&mut self, arena: &'a Arena, id: NodeId) -> OpenContainer<'a> {
        let (bits, inside) = match interpret::value(arena, id) {
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
        OpenContainer { id, children: inside, next_child: 0 }
    }
}

/// A value whose insides are being asked.
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
    let has = |wanted| entries.iter().any(|&(key, _)| arena.text(key) == Some(wanted));
    entries.len() <= MAX_OPTIMIZER_ENTRIES && has("state") && has("param_groups")
}

fn require_unique_keys(arena: &Arena, id: NodeId) -> Result<(), SelectError> {
    let entries = arena.entries(id).unwrap_or_default();
    let (mut texts, mut numbers) = (HashSet::new(), HashSet::new());
    // A fraction can equal a whole number, and its value is not kept.
    let mut fractions = false;
    for &(key, _) in entries {
        let new = match arena.node(key) {
            Node::Int(n) => numbers.insert(n),
            Node::Bool(flag) => numbers.insert(i64::from(flag)),
            Node::Plain => {
                fractions = true;
                true
            }
            _ => arena.text(key).is_none_or(|text| texts.insert(text)),
        };
        if !new || fractions && !numbers.is_empty() {
            return Err(SelectError::NameCollision {
                name: key_text(arena, key).unwrap_or("?".to_owned()),
            });
        }
    }
    Ok(())
}
