//! Whether a path can be looked at without waiting for a mount of ours that is stuck.
//!
//! In: a path. Out: nothing, or the mount on its way that does not answer. What else keeps the path
//! from being found is for those to say who want what is there.

use std::path::Path;

use super::Error;
use super::heal::PATIENCE;
use super::probe::{self, Answer};
use super::table::{self, Spot};

/// Asks every mount of ours that the path leads through or to. A link that leads into one, and not to
/// the place where it shows, is not seen before it is followed.
pub fn check(path: &Path) -> Result<(), Error> {
    let Ok(ours) = table::ours() else { return Ok(()) };
    let Ok(whole) = std::path::absolute(path) else { return Ok(()) };
    if ours.is_empty() {
        return Ok(());
    }
    let mut asked = None;
    let mut places: Vec<&Path> = whole.ancestors().collect();
    // From the top: each is found through those that have answered.
    while let Some(place) = places.pop() {
        let Ok(spot) = Spot::at(place) else { return Ok(()) };
        let is_ours = ours.iter().any(|entry| entry.id == spot.mount());
        if is_ours && asked.replace(spot.mount()) != Some(spot.mount()) {
            let answer = probe::ask(spot.path(), PATIENCE);
            if answer == Answer::Silent {
                return Err(Error::Silent { path: spot.path().to_path_buf() });
            }
        }
    }
    Ok(())
}
