//! Taking mounts away that this process did not make: those whose daemon died, and any that the
//! user wants unmounted.
//!
//! In: a path. Out: what was done; a mount of another type is never touched, and none is ever waited
//! for longer than the times below.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::mount_info::mountinfo::{self, Entry, Spot};

use super::daemon::Daemon;
use super::liveness::{self, Answer};
use super::superblock::Superblock;
use super::{Error, attach};

/// A daemon that lives answers within milliseconds, or within a second where the machine is
/// overloaded; one that has not by then is stuck.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Dead mounts over one another at one path that are taken away at most: a bound for the loop.
const DEEP: usize = 64;

/// What shows at a path after the dead were taken away.
#[derive(Debug)]
pub struct Healed {
    /// How many dead mounts were taken away.
    pub dead: usize,
    /// The mount of ours that shows there now, and what it answers.
    pub left: Option<(Entry, Answer)>,
}

/// Takes away the mounts of ours at a path whose daemons are gone.
pub fn heal(path: &Path) -> Result<Healed, Error> {
    for dead in 0..DEEP {
        let spot = Spot::at(path)?;
        let shows = |entry: &Entry| entry.is_ours() && entry.mountpoint == spot.path();
        let Some(entry) = spot.entry()?.filter(shows) else {
            return Ok(Healed { dead, left: None });
        };
        match liveness::ask(spot.path(), PATIENCE) {
            Answer::Dead => attach::detach(&spot)?,
            answer => return Ok(Healed { dead, left: Some((entry, answer)) }),
        }
        tracing::info!("{}: took away a mount whose daemon is gone", spot.path().display());
    }
    Err(Error::Io {
        path: path.to_path_buf(),
        action: "take away all the dead mounts there",
        source: std::io::Error::other("there are too many"),
    })
}

/// A mount that was taken out of the tree.
#[derive(Debug)]
pub struct Unmounted {
    /// Where it was.
    pub path: PathBuf,
    /// Who served it.
    pub served: Served,
}

/// Who serves a mount that was taken away, or did.
#[derive(Debug)]
pub enum Served {
    /// Nobody: its daemon had died before.
    ByNobody,
    /// This daemon, which ends with the superblock.
    By(Daemon, Superblock),
    /// It did not say by whom, or this user may not know.
    Unknown(Superblock),
}

/// Unmounts what shows at a path, which must be ours; lazily: out of the tree at once, used or not.
/// Does not wait for its daemon to end.
pub fn unmount(path: &Path, lazy: bool) -> Result<Unmounted, Error> {
    let Healed { dead, left } = heal(path)?;
    let Some((entry, answer)) = left else {
        if dead > 0 {
            let path = Spot::at(path)?.path().to_path_buf();
            return Ok(Unmounted { path, served: Served::ByNobody });
        }
        return Err(not_ours(path)?);
    };
    let superblock = Superblock::of_mount(entry.clone());
    let silent = answer == Answer::Silent;
    let daemon = match answer {
        Answer::Alive(Some(stats)) => Daemon::of(stats.pid),
        _ => Daemon::behind(entry.device),
    };
    let taken = if lazy {
        detach(path, &entry)
    } else {
        // It may be our own question that is in the way: it is given up, or it is stuck.
        let passing_by = if silent { PATIENCE } else { attach::PASSING_BY };
        attach::unmount(&entry.mountpoint, passing_by).map_err(|error| match error {
            Error::Busy { path } if silent => Error::Silent { path },
            error => error,
        })
    };
    match taken {
        // Somebody else was faster: it is gone, as was wanted.
        Err(_) if !is_there(&entry)? => {}
        taken => taken?,
    }
    let served = match daemon {
        Some(daemon) => Served::By(daemon, superblock),
        None => Served::Unknown(superblock),
    };
    Ok(Unmounted { path: entry.mountpoint, served })
}

fn detach(path: &Path, entry: &Entry) -> Result<(), Error> {
    let spot = Spot::at(path)?;
    if spot.mount() != entry.id {
        return Err(not_ours(path)?);
    }
    attach::detach(&spot)
}

fn is_there(entry: &Entry) -> Result<bool, Error> {
    let mut all = mountinfo::all()?.into_iter();
    Ok(all.any(|other| (other.id, other.device) == (entry.id, entry.device)))
}

/// What a path is that should have been a mount of ours.
fn not_ours(path: &Path) -> Result<Error, Error> {
    let spot = Spot::at(path)?;
    let path = path.to_path_buf();
    let Some(entry) = spot.entry()? else {
        return Ok(Error::NotOurs { path, what: "nothing is mounted there".into(), within: None });
    };
    let kind = mountinfo::shown(&entry.kind);
    let place = entry.mountpoint.display().to_string();
    let (what, within) = if entry.mountpoint == spot.path() {
        (format!("a mount of type {kind} shows there"), None)
    } else if entry.is_ours() {
        (format!("it lies inside the one at {place}"), Some(entry.mountpoint))
    } else {
        (format!("it lies on {place} (type {kind}), and nothing is mounted there"), None)
    };
    Ok(Error::NotOurs { path, what, within })
}
