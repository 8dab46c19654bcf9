//! The state dict of a torch checkpoint: which dictionary is shown, and the names of its entries.

mod error;
mod flatten_names;
mod keys;
mod reachability;
mod select;

pub use error::{FLAT_PARAMETER, FLAT_PARAMETER_REMEDY, SelectError};
pub use flatten_names::Selection;
pub use keys::is_training_key;
pub use select::select_state_dict;
