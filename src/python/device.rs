//! Loading tensors to CUDA devices.
//!
//! In: [`Tensor`]s, addresses on devices of memory that torch or somebody else has, and the streams of who uses
//! it. Out: what the load did; the bytes are there for whatever those streams are given next.

use std::process;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::{self, Gpudirect, Loader, Stream, Wanted};
use crate::threads::lock;

use super::error::raised_of_device;
use super::interruptible::{Stop, Wait, without_lock};
use super::load::{One, Told, check_places, one, wait};
use super::memory::Memory;
use super::tensor::Tensor;

/// Pinned memory that stays for the next load.
const KEPT: u64 = 64 << 20;

/// What this process loads to devices with.
static LOADER: Mutex<Option<Held>> = Mutex::new(None);

struct Held {
    process: u32,
    how: How,
    loader: Arc<Loader>,
}

/// How much memory may be pinned, and whether GPUDirect Storage is wanted, or not, or where it is plainly there.
type How = (u64, Option<bool>);

/// The loader of this process that loads so.
fn loader(how: How) -> Arc<Loader> {
    let (mut held, process) = (lock(&LOADER), process::id());
    match &*held {
        Some(held) if (held.process, held.how) == (process, how) => {
            return Arc::clone(&held.loader);
        }
        _ => {}
    }
    let (pinned, gpudirect) = how;
    let gpudirect = match gpudirect {
        None => Gpudirect::Auto,
        Some(true) => Gpudirect::Asked,
        Some(false) => Gpudirect::Never,
    };
    let loader = Arc::new(Loader::new(pinned).gpudirect(gpudirect));
    let before = held.replace(Held { process, how, loader: Arc::clone(&loader) });
    drop(held);
    if let Some(before) = before.filter(|before| before.process != process) {
        // What the driver gave to another process is that one's: nothing may be done with it here.
        std::mem::forget(before);
    }
    loader
}

/// Why nothing can be loaded straight to the device of a number, in words; nothing if it can.
#[pyfunction]
pub fn lacks_device(py: Python<'_>, ordinal: usize, how: How) -> Option<String> {
    py.detach(|| loader(how).prepare(ordinal).err().map(|error| error.to_string()))
}

/// Whether a device uses the host's memory, and has none of its own.
#[pyfunction]
pub fn is_integrated(py: Python<'_>, ordinal: usize, how: How) -> PyResult<bool> {
    let device = py.detach(|| loader(how).device(ordinal));
    Ok(device.map_err(|error| raised_of_device(py, &error))?.is_integrated())
}

/// Loads tensors, each into memory of the device of its number that begins at its address, which must be there,
/// as long as the tensor and nobody else's. `streams` has of each device the stream whose work used that memory,
/// and will: what it is given once this has returned finds the bytes there.
#[pyfunction]
#[pyo3(signature = (tensors, addresses, devices, streams, how, stop=None, threads=None))]
#[allow(clippy::too_many_arguments)]
pub fn load_to_devices(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, Tensor>>,
    addresses: Vec<usize>,
    devices: Vec<usize>,
    streams: Vec<(usize, usize)>,
    how: How,
    stop: Option<PyRef<'_, Stop>>,
    threads: Option<usize>,
) -> PyResult<Told> {
    if tensors.len() != addresses.len() || tensors.len() != devices.len() {
        return Err(PyValueError::new_err("every tensor needs an address and a device"));
    }
    let tensors: Vec<One> = tensors.iter().map(|tensor| one(tensor)).collect();
    check_places(&tensors, &addresses)?;
    let stop = Stop::flag(stop.as_deref());
    // The memory is the caller's, who may use it for something else from the return of this on.
    let wait = wait(&tensors, Wait::ToTheEnd);
    let told_to = Arc::clone(&stop);
    let done = without_lock(py, wait, &stop, move || {
        let loader = loader(how);
        let users = streams.into_iter().map(|(ordinal, stream)| {
            let device = loader.device(ordinal)?;
            // SAFETY: the package has seen that this is torch's stream of this device, which torch never ends.
            #[allow(unsafe_code)]
            Ok(unsafe { device.stream_of(stream) })
        });
        let users = users.collect::<Result<Vec<Stream>, cuda::Error>>()?;
        let places = addresses.into_iter().zip(devices);
        let wanted = tensors.iter().zip(places);
        let wanted =
            wanted.map(|((of, tensor), (at, on))| Wanted { of, tensor, on, at: at as u64 });
        // SAFETY: the package has seen that this memory belongs to contiguous tensors of that many bytes on these
        // devices, of which no two overlap, and holds on to it until this returns; who uses it then does so by
        // the streams given.
        #[allow(unsafe_code)]
        unsafe {
            loader.load_into(wanted, &users, &told_to, threads)
        }
    })?;
    Ok(Told(done.map_err(|error| raised_of_device(py, &error))?))
}

/// Loads tensors into memory of a device that the driver gives, and waits until they are there. Also what that did.
#[pyfunction]
#[pyo3(signature = (tensors, device, how, stop=None, threads=None))]
pub fn load_on_device(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, Tensor>>,
    device: usize,
    how: How,
    stop: Option<PyRef<'_, Stop>>,
    threads: Option<usize>,
) -> PyResult<(Vec<Memory>, Told)> {
    let tensors: Vec<One> = tensors.iter().map(|tensor| one(tensor)).collect();
    let stop = Stop::flag(stop.as_deref());
    let wait = wait(&tensors, Wait::OrLeave);
    let told_to = Arc::clone(&stop);
    let done = without_lock(py, wait, &stop, move || {
        let tensors: Vec<_> = tensors.iter().map(|(of, tensor)| (&**of, tensor)).collect();
        loader(how).load_until(&tensors, device, &told_to, threads)
    })?;
    let (pieces, report) = done.map_err(|error| raised_of_device(py, &error))?;
    Ok((pieces.into_iter().map(Memory::on_device).collect(), Told(report)))
}

/// Gives pinned memory that is idle back to the system, but for what a next load begins with.
#[pyfunction]
pub fn trim_pinned(py: Python<'_>) {
    py.detach(|| {
        let held = lock(&LOADER);
        let mine = held.as_ref().filter(|held| held.process == process::id());
        let loader = mine.map(|held| Arc::clone(&held.loader));
        drop(held);
        loader.iter().for_each(|loader| loader.trim(KEPT));
    });
}
