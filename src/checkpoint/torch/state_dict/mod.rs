//! The state dict of a torch checkpoint: which dictionary is shown, and the names of its entries.

mod error;
mod flatten_names;
mod keys;
mod reachability;
mod select;

pub use error::SelectError;
pub use flatten_names::Selection;
pub use select::select_state_dict;
