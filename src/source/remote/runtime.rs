//! The threads that serve the sockets of a process.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::threads::lock_holding_forks;

use super::error::RemoteError;

/// Threads for sockets and encryption. Bytes are copied to their place by the reader's own thread.
const THREAD_COUNT: usize = 2;

/// The runtime, and the process that made it: threads do not survive a fork.
static RUNTIME: Mutex<Option<(u32, Arc<Runtime>)>> = Mutex::new(None);

fn runtime() -> io::Result<Arc<Runtime>> {
    let mut current = lock_holding_forks(&RUNTIME);
    let pid = std::process::id();
    if let Some((owner, runtime)) = &*current
        && *owner == pid
    {
        return Ok(Arc::clone(runtime));
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREAD_COUNT)
        .thread_name("ckptfs-net")
        .enable_all()
        .build()?;
    let runtime = Arc::new(runtime);
    // The parent's runtime is never dropped here: that would wait for its threads, which this process lacks.
    if let Some(of_parent) = current.replace((pid, Arc::clone(&runtime))) {
        std::mem::forget(of_parent);
    }
    Ok(runtime)
}

/// Set when all requests of this process must end.
static STOP_FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The time between two reads of the flag.
const STOP_INTERVAL: Duration = Duration::from_millis(50);

/// Makes every request to a store fail once the flag is set, so that a stopped command waits for no server. Only the first
/// flag counts.
pub fn stop_requests_with(flag: &Arc<AtomicBool>) {
    STOP_FLAG.get_or_init(|| Arc::clone(flag));
}

/// Runs a future on the calling thread, which must not be a thread of the runtime, until it ends or requests must end.
pub fn block_on<T>(future: impl Future<Output = T>) -> Result<T, RemoteError> {
    let runtime = runtime().map_err(RemoteError::Runtime)?;
    let Some(flag) = STOP_FLAG.get() else { return Ok(runtime.block_on(future)) };
    let is_set = async {
        while !flag.load(Relaxed) {
            tokio::time::sleep(STOP_INTERVAL).await;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            value = future => Ok(value),
            () = is_set => Err(RemoteError::Stopped),
        }
    })
}
