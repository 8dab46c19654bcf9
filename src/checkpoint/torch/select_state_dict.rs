//! Picks the dictionary of tensors that a torch checkpoint is shown as, and names its entries.
//!
//! The rule, first match first: the top if all its values are tensors; the entry that is its state dict
//! ([`super::state_dict`]); else everything, nested names joined with dots. It is applied again to what it led to.
//! A key that the user gives settles it instead.

use std::collections::HashSet;

use crate::checkpoint::truncated_list::TruncatedList;

use super::flatten_names::{NameFlattener, Selection};
use super::interpret::{self, PickleValue, as_counts, key_text};
use super::pickle::{Arena, NodeId};
use super::reachability::Reachability;
use super::select_error::SelectError;
use super::state_dict::find_state_dict;

/// Dictionaries inside one another; training checkpoints have fewer than 10.
const MAX_DEPTH: usize = 64;

/// Picks the dictionary by the rule or by the given key, and names its entries. `stored` is the number of bytes that
/// the pickle takes in its file.
pub fn select_state_dict(
    arena: &Arena,
    top: NodeId,
    stored: u64,
    root_key: Option<&str>,
) -> Result<Selection, SelectError> {
    let census = Reachability::compute(arena, top)?;
    let mut chosen = Selection::default();
    let root = match root_key {
        Some(key) => {
            let mut roots = Vec::new();
            find_by_path(arena, top, key, MAX_DEPTH, &mut roots)?;
            roots.retain(|&id| census.has_tensors(id));
            if roots.len() > 1 {
                return Err(SelectError::NameCollision { name: key.to_owned() });
            }
            let missing = || SelectError::NoSuchKey {
                key: key.to_owned(),
                found: tensor_keys(arena, &census, top, |_| true),
            };
            let root = roots.pop().ok_or_else(missing)?;
            chosen.notes.push(format!("shown: `{key}`, as asked"));
            root
        }
        None => descend(arena, &census, top, &mut chosen.notes)?,
    };
    if let PickleValue::Object(class) = interpret::value(arena, root) {
        return Err(SelectError::Object { class });
    }
    if is_zero_stage_3(arena, top, root) {
        return Err(SelectError::ZeroStage3);
    }
    let mut naming = NameFlattener::new(arena, &census, chosen, stored);
    match interpret::value(arena, root) {
        PickleValue::Tensor(tensor) => naming.add("tensor".to_owned(), root, tensor.err())?,
        _ => naming.flatten("", root, MAX_DEPTH)?,
    }
    let (mut chosen, left_out) = naming.finish();
    let mut names = HashSet::new();
    for name in chosen.entries.iter().map(|e| &e.0).chain(chosen.refused.iter().map(|r| &r.name)) {
        if !names.insert(name.as_str()) {
            return Err(SelectError::NameCollision { name: name.clone() });
        }
    }
    if chosen.entries.is_empty() && chosen.refused.is_empty() {
        return Err(SelectError::NoTensors(tensor_keys(arena, &census, top, |_| true)));
    }
    if !left_out.is_empty() {
        chosen.notes.push(format!("left out, not tensors: {left_out}"));
    }
    Ok(chosen)
}

/// Whether a dictionary is the `module` of DeepSpeed's model states at ZeRO stage 3: `param_shapes` lies beside it,
/// and a parameter with a shape there is empty.
fn is_zero_stage_3(arena: &Arena, top: NodeId, root: NodeId) -> bool {
    let entry = |at: NodeId, wanted: &str| {
        let mut entries = arena.entries(at).unwrap_or_default().iter();
        entries.find(|&&(key, _)| arena.text(key) == Some(wanted)).map(|&(_, value)| value)
    };
    let is_empty = |id: NodeId| match interpret::value(arena, id) {
        PickleValue::Tensor(Ok(tensor)) => tensor.shape.contains(&0),
        _ => false,
    };
    let Some(shapes) = entry(top, "param_shapes") else { return false };
    let groups = arena.items(shapes).unwrap_or(std::slice::from_ref(&shapes));
    let shaped: HashSet<&str> = groups
        .iter()
        .flat_map(|&group| arena.entries(group).unwrap_or_default())
        .filter(|&&(_, shape)| as_counts(arena, shape).is_none_or(|shape| !shape.contains(&0)))
        .filter_map(|&(name, _)| arena.text(name))
        .collect();
    let mut weights = arena.entries(root).unwrap_or_default().iter();
    weights.any(|&(name, value)| {
        arena.text(name).is_some_and(|name| shaped.contains(name)) && is_empty(value)
    })
}

/// Walks down by the rule.
fn descend(
    arena: &Arena,
    census: &Reachability,
    top: NodeId,
    notes: &mut Vec<String>,
) -> Result<NodeId, SelectError> {
    let mut at = top;
    let mut path: Vec<&str> = Vec::new();
    let mut passed = HashSet::new();
    while passed.insert(Arena::index(at)) {
        let Some(entries) = arena.entries(at) else { return Ok(at) };
        let is_tensor = |id| matches!(interpret::value(arena, id), PickleValue::Tensor(_));
        if entries.iter().all(|&(_, value)| is_tensor(value)) {
            if path.is_empty() {
                notes.push("shown: the top, all of whose values are tensors".to_owned());
            }
            return Ok(at);
        }
        let Some(((key, value), reason)) = find_state_dict(arena, census, entries) else {
            if path.is_empty() {
                let mut note = "shown: the whole, nested names joined with dots".to_owned();
                let found = tensor_keys(arena, census, at, |id| !is_tensor(id));
                if found.len() > 1 {
                    note += &format!("; choose one with --root: {found}");
                }
                notes.push(note);
            }
            return Ok(at);
        };
        let mut others = TruncatedList::default();
        for &(k, value) in entries {
            if arena.text(k) != Some(key) && census.has_tensors(value) {
                let name = || key_text(arena, k).unwrap_or("?".to_owned());
                others.add(|| [path.as_slice(), &[&name()]].concat().join("."));
            }
        }
        path.push(key);
        let mut note = format!("shown: `{}` ({})", path.join("."), reason.text());
        if !others.is_empty() {
            note += &format!("; not shown, choose with --root: {others}");
        }
        notes.push(note);
        at = value;
        if path.len() == MAX_DEPTH {
            break;
        }
    }
    Err(SelectError::TooDeep)
}

/// Follows a dotted path to everything that it can mean: a key may itself have dots in it.
fn find_by_path(
    arena: &Arena,
    at: NodeId,
    path: &str,
    depth: usize,
    found: &mut Vec<NodeId>,
) -> Result<(), SelectError> {
    let depth = depth.checked_sub(1).ok_or(SelectError::TooDeep)?;
    let mut step = |key: &str, value: NodeId| match path.strip_prefix(key) {
        Some("") => {
            found.push(value);
            Ok(())
        }
        Some(rest) => match rest.strip_prefix('.') {
            Some(rest) => find_by_path(arena, value, rest, depth, found),
            None => Ok(()),
        },
        None => Ok(()),
    };
    for &(key, value) in arena.entries(at).unwrap_or_default() {
        if let Some(key) = key_text(arena, key) {
            step(&key, value)?;
        }
    }
    let place = path.split('.').next().unwrap_or_default();
    let item = place.parse().ok().and_then(|n: usize| arena.items(at)?.get(n).copied());
    item.map_or(Ok(()), |value| step(place, value))
}

/// Keys of a dictionary whose values have tensors and pass `is_kind`.
fn tensor_keys(
    arena: &Arena,
    census: &Reachability,
    at: NodeId,
    is_kind: impl Fn(NodeId) -> bool,
) -> TruncatedList {
    let mut listed = TruncatedList::default();
    for &(key, value) in arena.entries(at).unwrap_or_default() {
        if census.has_tensors(value) && is_kind(value) {
            listed.add(|| key_text(arena, key).unwrap_or("?".to_owned()));
        }
    }
    listed
}
