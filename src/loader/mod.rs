//! Loads tensors from a checkpoint straight into memory, whatever its format, mounted or not.
//!
//! A path is a checkpoint, a directory that holds one, the name that a mount would show, or a file of a mount.
//! It is opened as an [`OpenCheckpoint`], which loads whole tensors, slices of them, or many at once;
//! [`load_many`] loads those of several. A file of a mount is read at its source and not through the mount, if
//! the source can be seen and is the same.
//!
//! A path is resolved and opened (`open`). A load is planned (`virtual_file::plan_jobs`) and executed (`execute`), and
//! its bytes go to a `sink`.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//!
//! let model = ckptfs::open(Path::new("models/llama"))?;
//! for tensor in model.tensors() {
//!     println!("{} {:?} {:?}", tensor.name, tensor.dtype, tensor.shape);
//! }
//! let weight = model.load(model.tensor("lm_head.weight")?)?;
//! println!("{} bytes", weight.len());
//! # Ok(())
//! # }
//! ```

mod error;
mod execute;
mod handle;
mod memory;
mod open;
mod sink;
mod stream;

pub use error::LoadError;
pub use execute::LoadReport;
pub use handle::{LoadRequest, OpenCheckpoint, Route, load_many, load_many_owned};
#[cfg(feature = "cuda")]
pub(crate) use handle::{SinkRequest, load_with_sink};
pub use memory::{BufferAlignment, MapRefusal, MappedTensor, TensorBuffer};
pub use open::{LoadOptions, LoadRecipe, open};
#[cfg(feature = "cuda")]
pub(crate) use sink::{BUFFER_BYTES, Sink};
