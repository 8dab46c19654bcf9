//! The threads that serve the sockets of a process.

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex};

use tokio::runtime::{Builder, Runtime};

use crate::threads::lock_holding_forks;

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

/// Runs a future on the calling thread, which must not be a thread of the runtime.
pub fn block_on<T>(future: impl Future<Output = T>) -> io::Result<T> {
    Ok(runtime()?.block_on(future))
}
