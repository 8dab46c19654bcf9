//! Notices a save into a folder that holds an earlier one. Until it ends, the table is that of the earlier save.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use crate::checkpoint::training_error::TrainingError;
use crate::source::{FileIdentity, OpenFile, SourceFile};

/// The time from the last write of data until the table must be there. A smaller one would miss saves whose ranks first
/// gather a table of 100,000 pieces.
const TABLE_DELAY: Duration = Duration::from_secs(2);

/// The time between two looks at the files.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Fails if a save is writing data of which the table does not know. `pairs` are data files and their tables.
///
/// torch writes a table after the data. Data that is newer is of a save that has not ended, or of a copy that wrote the
/// table first. Times alone do not tell: but only the files of a save change soon. So a fresh copy is read late, and
/// never refused.
pub fn check_save_ended(pairs: &[(&OpenFile, &Arc<SourceFile>)]) -> Result<(), TrainingError> {
    let time = |identity: FileIdentity| (identity.mtime, identity.mtime_nsec);
    let is_newer = |(data, table): &&(&OpenFile, &Arc<SourceFile>)| {
        time(data.file().identity()) > time(table.identity())
    };
    let newer: Vec<_> = pairs.iter().filter(is_newer).collect();
    let Some(last) =
        newer.iter().map(|(data, _)| data.file().identity()).max_by_key(|id| time(*id))
    else {
        return Ok(());
    };
    while age(last).is_some_and(|age| age < TABLE_DELAY) {
        sleep(POLL_INTERVAL);
        for (data, table) in &newer {
            if data.check_unchanged().is_err() || table.open().is_err() {
                let path = data.file().path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                return Err(TrainingError::SaveRunning { name });
            }
        }
    }
    Ok(())
}

/// Time since the last write; `None` if it lies in the future, as that of another machine's clock.
fn age(identity: FileIdentity) -> Option<Duration> {
    let seconds = Duration::from_secs(u64::try_from(identity.mtime).ok()?);
    let written = seconds + Duration::from_nanos(identity.mtime_nsec.into());
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + written).ok()
}
