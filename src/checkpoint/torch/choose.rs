//! Picks the dictionary of tensors that a torch checkpoint is shown as, and names its entries.
//!
//! The rule, first match first: the top if all its values are tensors; what lies under
//! `state_dict`, then `model`, then `module`; the value of a dictionary with one entry; else
//! everything, nested names joined with dots. It is applied again to what it led to.
//! A key that the user gives settles it instead.

use std::collections::HashSet;

use crate::checkpoint::{MAX_TENSORS, Refused, TensorFault};

use super::meaning::{self, Value, View};
use super::pickle::{Arena, Id, Node};

/// Dictionaries inside one another; training checkpoints have fewer than 10.
const MAX_DEPTH: usize = 64;

/// Values looked at while naming entries. A dictionary that is used in many places is looked at
/// in each, and only this keeps a small pickle from having more names than memory can hold.
const MAX_VISITS: usize = 4 * MAX_TENSORS;

/// Keys that hold a state dict, in this order.
const USUAL_KEYS: [&str; 3] = ["state_dict", "model", "module"];

/// Names listed in a note before the rest is a number.
const NAMED_IN_NOTE: usize = 8;

/// Why there is no dictionary to show.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Nothing in it is a tensor.
    #[error("holds no tensors{0}")]
    NoTensors(String),
    /// The key that was asked for is not there.
    #[error("has no `{key}` with tensors; there are: {found}")]
    NoSuchKey {
        /// The key.
        key: String,
        /// What there is instead.
        found: String,
    },
    /// Not a dictionary, but an object.
    #[error("holds a Python object of class {class}, not a dictionary of tensors")]
    Object {
        /// Its class.
        class: String,
    },
    /// Two entries come to the same name.
    #[error("two entries come to the name `{name}`")]
    Collision {
        /// The name.
        name: String,
    },
    /// Dictionaries too deep inside one another, or too many of them.
    #[error("its dictionaries are nested deeper or more widely than any checkpoint's")]
    TooDeep,
}

impl Fault {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Fault::NoTensors(_) => "give the file that holds the weights",
            Fault::NoSuchKey { .. } | Fault::Collision { .. } => {
                "choose another dictionary with --root KEY"
            }
            Fault::Object { .. } => {
                "where the file comes from, save model.state_dict() instead of the model: reading an object means running its code"
            }
            Fault::TooDeep => "save the state dict alone",
        }
    }
}

/// The entries of the chosen dictionary.
#[derive(Debug, Default)]
pub struct Chosen {
    pub tensors: Vec<(String, View)>,
    pub refused: Vec<Refused>,
    pub notes: Vec<String>,
}

/// Picks and names, by the rule or by the given key.
pub fn choose(arena: &Arena, top: Id, root_key: Option<&str>) -> Result<Chosen, Fault> {
    let census = Census { arena, answers: vec![0; arena.len()] }.of(top)?;
    let mut chosen = Chosen::default();
    let root = match root_key {
        Some(key) => {
            let root = find(arena, top, key, MAX_DEPTH).filter(|&id| census.has_tensors(id));
            let missing = || Fault::NoSuchKey {
                key: key.to_owned(),
                found: listed(branches(arena, &census, top)),
            };
            let root = root.ok_or_else(missing)?;
            chosen.notes.push(format!("shown: `{key}`, as asked"));
            root
        }
        None => descend(arena, &census, top, &mut chosen.notes)?,
    };
    if let Value::Opaque(class) = meaning::value(arena, root) {
        return Err(Fault::Object { class });
    }
    let mut naming = Naming { arena, census: &census, chosen, left_out: Vec::new(), visits: 0 };
    match meaning::value(arena, root) {
        Value::Tensor(tensor) => naming.add("tensor".to_owned(), tensor),
        _ => naming.name_all("", root, MAX_DEPTH)?,
    }
    let Naming { mut chosen, left_out, .. } = naming;
    let mut names = HashSet::new();
    for name in chosen.tensors.iter().map(|t| &t.0).chain(chosen.refused.iter().map(|r| &r.name)) {
        if !names.insert(name.as_str()) {
            return Err(Fault::Collision { name: name.clone() });
        }
    }
    if chosen.tensors.is_empty() && chosen.refused.is_empty() {
        let found = branches(arena, &census, top);
        let found =
            if found.is_empty() { String::new() } else { format!("; it has: {}", listed(found)) };
        return Err(Fault::NoTensors(found));
    }
    if !left_out.is_empty() {
        chosen.notes.push(format!("left out, not tensors: {}", listed(left_out)));
    }
    Ok(chosen)
}

/// Walks down by the rule.
fn descend(arena: &Arena, census: &Answers, top: Id, notes: &mut Vec<String>) -> Result<Id, Fault> {
    let mut at = top;
    let mut path: Vec<&str> = Vec::new();
    for _ in 0..MAX_DEPTH {
        let Some(entries) = arena.entries(at) else {
            return Ok(at);
        };
        let is_tensor = |id| matches!(meaning::value(arena, id), Value::Tensor(_));
        if entries.iter().all(|&(_, value)| is_tensor(value)) {
            return Ok(at);
        }
        let is_branch = |id: Id| arena.entries(id).is_some() && census.has_tensors(id);
        let branches = || {
            let named = entries.iter().filter_map(|&(key, value)| Some((arena.text(key)?, value)));
            named.filter(|&(_, value)| is_branch(value))
        };
        let usual = USUAL_KEYS.iter().find_map(|&key| branches().find(|&(name, _)| name == key));
        let only = || branches().next().filter(|_| entries.len() == 1);
        let Some((key, value)) = usual.or_else(only) else {
            return Ok(at);
        };
        let others = entries.iter().filter(|&&(k, _)| arena.text(k) != Some(key));
        let others: Vec<String> = others
            .filter(|&&(_, v)| census.has_tensors(v))
            .map(|&(k, _)| {
                [path.as_slice(), &[&key_text(arena, k).unwrap_or_default()]].concat().join(".")
            })
            .collect();
        path.push(key);
        let why = if usual.is_some() { "the usual key" } else { "the only entry" };
        let mut note = format!("shown: `{}` ({why})", path.join("."));
        if !others.is_empty() {
            note += &format!("; not shown, choose with --root: {}", listed(others));
        }
        notes.push(note);
        at = value;
    }
    Err(Fault::TooDeep)
}

/// Follows a dotted path; a key may itself have dots in it.
fn find(arena: &Arena, at: Id, path: &str, depth: usize) -> Option<Id> {
    if depth == 0 {
        return None;
    }
    let step = |key: &str, value: Id| match path.strip_prefix(key) {
        Some("") => Some(value),
        Some(rest) => find(arena, value, rest.strip_prefix('.')?, depth - 1),
        None => None,
    };
    if let Some(entries) = arena.entries(at) {
        return entries.iter().find_map(|&(key, value)| step(&key_text(arena, key)?, value));
    }
    arena.items(at)?.iter().enumerate().find_map(|(place, &value)| step(&place.to_string(), value))
}

/// The keys of a dictionary that lead to tensors.
fn branches(arena: &Arena, census: &Answers, at: Id) -> Vec<String> {
    let entries = arena.entries(at).unwrap_or_default();
    entries
        .iter()
        .filter(|&&(_, v)| census.has_tensors(v))
        .filter_map(|&(k, _)| key_text(arena, k))
        .collect()
}

fn listed(names: Vec<String>) -> String {
    let more = names.len().saturating_sub(NAMED_IN_NOTE);
    let mut text: Vec<String> =
        names.iter().take(NAMED_IN_NOTE).map(|name| format!("`{name}`")).collect();
    match (more, text.is_empty()) {
        (0, true) => "none".to_owned(),
        (0, false) => text.join(", "),
        _ => {
            text.push(format!("and {more} more"));
            text.join(", ")
        }
    }
}

fn key_text(arena: &Arena, key: Id) -> Option<String> {
    match arena.node(key) {
        Node::Int(n) => Some(n.to_string()),
        _ => arena.text(key).map(str::to_owned),
    }
}

/// Which values lead to tensors, each answered once.
struct Census<'a> {
    arena: &'a Arena,
    /// Per value: 0 not asked, else bits.
    answers: Vec<u8>,
}

const ASKED: u8 = 1;
const TENSORS: u8 = 2;
const OBJECTS: u8 = 4;

struct Answers(Vec<u8>);

impl Answers {
    fn has_tensors(&self, id: Id) -> bool {
        self.0[Arena::place(id)] & TENSORS != 0
    }

    fn is_plain(&self, id: Id) -> bool {
        self.0[Arena::place(id)] & (TENSORS | OBJECTS) == 0
    }
}

impl Census<'_> {
    fn of(mut self, top: Id) -> Result<Answers, Fault> {
        self.ask(top, MAX_DEPTH)?;
        Ok(Answers(self.answers))
    }

    fn ask(&mut self, id: Id, depth: usize) -> Result<u8, Fault> {
        let known = self.answers[Arena::place(id)];
        if known != 0 {
            // A value inside itself is being answered further up: it adds nothing here.
            return Ok(known);
        }
        self.answers[Arena::place(id)] = ASKED;
        let mut answer = ASKED;
        let arena = self.arena;
        let depth = depth.checked_sub(1).ok_or(Fault::TooDeep)?;
        match meaning::value(arena, id) {
            Value::Tensor(_) => answer |= TENSORS,
            Value::Opaque(_) => answer |= OBJECTS,
            Value::Plain => {}
            Value::Entries(entries) => {
                for &(_, value) in entries {
                    answer |= self.ask(value, depth)?;
                }
            }
            Value::Items(items) => {
                for &item in items {
                    answer |= self.ask(item, depth)?;
                }
            }
        }
        self.answers[Arena::place(id)] = answer;
        Ok(answer)
    }
}

/// Gives every entry its dotted name.
struct Naming<'a> {
    arena: &'a Arena,
    census: &'a Answers,
    chosen: Chosen,
    left_out: Vec<String>,
    visits: usize,
}

impl Naming<'_> {
    fn name_all(&mut self, prefix: &str, at: Id, depth: usize) -> Result<(), Fault> {
        let depth = depth.checked_sub(1).ok_or(Fault::TooDeep)?;
        if let Some(entries) = self.arena.entries(at) {
            for &(key, value) in entries {
                match key_text(self.arena, key) {
                    Some(key) => self.name_one(format!("{prefix}{key}"), value, depth)?,
                    None if self.census.is_plain(value) => self.left_out.push(format!("{prefix}?")),
                    None => {
                        let refused =
                            Refused { name: format!("{prefix}?"), fault: TensorFault::Key };
                        self.chosen.refused.push(refused);
                    }
                }
            }
        } else {
            for (place, &value) in self.arena.items(at).unwrap_or_default().iter().enumerate() {
                self.name_one(format!("{prefix}{place}"), value, depth)?;
            }
        }
        Ok(())
    }

    fn name_one(&mut self, name: String, id: Id, depth: usize) -> Result<(), Fault> {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return Err(Fault::TooDeep);
        }
        match meaning::value(self.arena, id) {
            Value::Tensor(tensor) => self.add(name, tensor),
            Value::Opaque(class) => {
                self.chosen.refused.push(Refused { name, fault: TensorFault::Opaque { class } });
            }
            _ if self.census.is_plain(id) => self.left_out.push(name),
            _ => self.name_all(&format!("{name}."), id, depth)?,
        }
        Ok(())
    }

    fn add(&mut self, name: String, tensor: Result<View, TensorFault>) {
        let tensor = if name == "__metadata__" { Err(TensorFault::Reserved) } else { tensor };
        match tensor {
            Ok(view) => self.chosen.tensors.push((name, view)),
            Err(fault) => self.chosen.refused.push(Refused { name, fault }),
        }
    }
}
