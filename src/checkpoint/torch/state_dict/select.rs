//! Selects the dictionary of tensors that a torch checkpoint is shown as, and names its entries.
//!
//! The first rule that fits decides. 1: the top, if all its values are tensors. 2: the entry that is its state dict
//! ([`super::keys`]). 3: everything, nested names joined with dots. The rules are applied again to the entry. A key of
//! the user takes precedence over the rules.

use std::collections::HashSet;

use crate::checkpoint::torch::interpret::{PickleValue, interpret};
use crate::checkpoint::torch::names::key_text;
use crate::checkpoint::torch::pickle::{Arena, NodeId};
use crate::checkpoint::torch::tensor_view::as_counts;
use crate::checkpoint::truncated_list::TruncatedList;

use super::error::SelectError;
use super::flatten_names::{NameFlattener, Selection};
use super::keys::{find_state_dict, is_training_entry, model_object};
use super::reachability::Reachability;

/// Maximum depth of nested dictionaries; training checkpoints have fewer than 10.
const MAX_DEPTH: usize = 64;

/// Selects the dictionary by the rules or by the user's key, and names its entries. The pickle takes `stored_len`
/// bytes in its file.
pub fn select_state_dict(
    arena: &Arena,
    top: NodeId,
    stored_len: u64,
    root_key: Option<&str>,
) -> Result<Selection, SelectError> {
    let reachability = Reachability::compute(arena, top)?;
    let mut selection = Selection::default();
    let (root, path) = match root_key {
        Some(key) => {
            let mut roots = Vec::new();
            find_by_path(arena, top, key, MAX_DEPTH, &mut roots)?;
            roots.retain(|&id| reachability.has_tensors(id));
            if roots.len() > 1 {
                return Err(SelectError::NameCollision { name: key.to_owned(), root: None });
            }
            let missing = || SelectError::NoSuchKey {
                key: key.to_owned(),
                found: tensor_keys(arena, &reachability, top, |id| !is_tensor(arena, id)),
            };
            let root = roots.pop().ok_or_else(missing)?;
            (root, None)
        }
        None => {
            let (root, path) = descend(arena, &reachability, top, &mut selection)?;
            (root, Some(path))
        }
    };
    if let PickleValue::Object(class) = interpret(arena, root) {
        let keys = path.unwrap_or_default().into();
        let script_class = find_script_class(arena);
        return Err(SelectError::Object { class, keys, script_class, other: None });
    }
    if let Some(mut keys) = path
        && let Some((inner_keys, class)) = model_object(arena, &reachability, root)
    {
        keys.extend(inner_keys);
        let is_other = |id| arena.entries(id).is_some() && !reachability.is_optimizer(id);
        let others = tensor_keys(arena, &reachability, top, is_other);
        let other = others.first().map(Box::from);
        let (keys, script_class) = (keys.into(), find_script_class(arena));
        return Err(SelectError::Object { class, keys, script_class, other });
    }
    if is_zero_stage_3(arena, top, root) {
        return Err(SelectError::ZeroStage3);
    }
    let mut flattener = NameFlattener::new(arena, &reachability, selection, stored_len);
    match interpret(arena, root) {
        PickleValue::Tensor(tensor) => flattener.add("tensor".to_owned(), root, tensor.err())?,
        _ => flattener.flatten("", root, MAX_DEPTH)?,
    }
    let (mut selection, left_out) = flattener.finish();
    let mut names = HashSet::new();
    let entries = selection.entries.iter().map(|entry| &entry.0);
    let pieces = selection.rank_pieces.iter().map(|entry| &entry.name);
    let refused = selection.refused.iter().map(|entry| &entry.name);
    for name in entries.chain(pieces).chain(refused) {
        if !names.insert(name.as_str()) {
            let is_dictionary = |id| arena.entries(id).is_some();
            let found = tensor_keys(arena, &reachability, top, is_dictionary);
            let root = found.first().map(str::to_owned);
            return Err(SelectError::NameCollision { name: name.clone(), root });
        }
    }
    if selection.entries.is_empty()
        && selection.rank_pieces.is_empty()
        && selection.refused.is_empty()
    {
        return Err(SelectError::NoTensors(tensor_keys(arena, &reachability, top, |_| true)));
    }
    if !left_out.is_empty() {
        selection.notes.push(format!("left out, not tensors: {left_out}"));
    }
    Ok(selection)
}

/// The first class that a pickle takes from the `__main__` of the program that saved it.
fn find_script_class(arena: &Arena) -> Option<Box<str>> {
    let mut globals = arena.globals();
    globals.find(|(module, _)| *module == "__main__").map(|(_, name)| name.into())
}

fn is_tensor(arena: &Arena, id: NodeId) -> bool {
    matches!(interpret(arena, id), PickleValue::Tensor(_))
}

/// Whether a dictionary is the `module` of DeepSpeed's model states at ZeRO stage 3. It then lies beside
/// `param_shapes`, and a parameter that has a shape there is empty.
fn is_zero_stage_3(arena: &Arena, top: NodeId, root: NodeId) -> bool {
    let entry = |dict: NodeId, name: &str| {
        let mut entries = arena.entries(dict).unwrap_or_default().iter();
        entries.find(|&&(key, _)| arena.text(key) == Some(name)).map(|&(_, value)| value)
    };
    let is_empty = |id: NodeId| match interpret(arena, id) {
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

/// Descends by the rules to the dictionary to show, and notes each step. Returns the dictionary and the keys that
/// lead to it.
fn descend(
    arena: &Arena,
    reachability: &Reachability,
    top: NodeId,
    selection: &mut Selection,
) -> Result<(NodeId, Vec<String>), SelectError> {
    let mut at = top;
    let mut path: Vec<&str> = Vec::new();
    let mut visited = HashSet::new();
    let owned = |path: &[&str]| path.iter().map(|&key| key.to_owned()).collect();
    while visited.insert(Arena::index(at)) {
        let Some(entries) = arena.entries(at) else { return Ok((at, owned(&path))) };
        // At the top this is no choice, and needs no note.
        if entries.iter().all(|&(_, value)| is_tensor(arena, value)) {
            return Ok((at, owned(&path)));
        }
        let Some(((key, value), reason)) = find_state_dict(arena, reachability, entries) else {
            if path.is_empty() {
                let mut note =
                    "shown: the whole dictionary, nested names joined with dots".to_owned();
                let found = tensor_keys(arena, reachability, at, |id| !is_tensor(arena, id));
                if found.len() > 1 {
                    note += &format!("; choose one with --root: {found}");
                }
                selection.notes.push(note);
            }
            return Ok((at, owned(&path)));
        };
        let mut others = TruncatedList::default();
        let mut is_obvious = true;
        for &(k, value) in entries {
            if arena.text(k) != Some(key) && reachability.has_tensors(value) {
                is_obvious &= is_training_entry(arena, reachability, k, value);
                let name = || key_text(arena, k).unwrap_or("?".to_owned());
                others.add(|| [path.as_slice(), &[&name()]].concat().join("."));
            }
        }
        path.push(key);
        let mut note = format!("shown: `{}` ({})", path.join("."), reason.text());
        if !others.is_empty() {
            note += &format!("; not shown, choose with --root: {others}");
        }
        match is_obvious {
            true => selection.obvious_choices.push(note),
            false => selection.notes.push(note),
        }
        at = value;
        if path.len() == MAX_DEPTH {
            break;
        }
    }
    Err(SelectError::TooDeep)
}

/// Follows a dotted path to every value that it can mean: a key may have dots in itself.
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
    let index = path.split('.').next().unwrap_or_default();
    let item = index.parse().ok().and_then(|n: usize| arena.items(at)?.get(n).copied());
    item.map_or(Ok(()), |value| step(index, value))
}

/// The keys of a dictionary whose values have tensors inside and pass a filter.
fn tensor_keys(
    arena: &Arena,
    reachability: &Reachability,
    at: NodeId,
    filter: impl Fn(NodeId) -> bool,
) -> TruncatedList {
    let mut listed = TruncatedList::default();
    for &(key, value) in arena.entries(at).unwrap_or_default() {
        if reachability.has_tensors(value) && filter(value) {
            listed.add(|| key_text(arena, key).unwrap_or("?".to_owned()));
        }
    }
    listed
}
