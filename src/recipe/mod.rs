//! Recipes: how a view differs from its sources, declared in a small file.
//!
//! In: a recipe's text, and checkpoints. Out: one checkpoint with other names, types and places of bytes. No tensor is read
//! or copied. It is laid out and read as any other.
//!
//! The steps have one order: `only` and `drop`, `rename`, `slice`, `split`, `stack`, `cast`. `only` and `drop` match the
//! names in the sources. Each later step matches the names that the step before gave.

mod arguments;
mod beside;
mod error;
mod file;
mod location;
mod name_glob;
mod relative_path;
mod shape;
mod steps;
mod template;
mod transform;
mod version_source;

pub use arguments::{ArgumentError, cast_argument, glob_argument, rename_argument};
pub use beside::BesideRule;
pub use error::{RecipeError, StepError, StepFault};
pub use file::{ConfigFields, Recipe, RecipeFile};
pub(crate) use location::RecipeLocation;
pub use name_glob::{GlobRule, NameGlob};
pub use relative_path::RelativePath;
pub use shape::MAX_RECIPE_BYTES;
pub use steps::{CastRule, RenameRule, SliceRule, SplitRule, StackRule};
pub use transform::Transform;
pub use version_source::VersionSource;
