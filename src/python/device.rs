//! Loading tensors to CUDA devices.
//!
//! In: [`Tensor`]s, addresses on devices of memory that torch or somebody else has, and the streams of who uses
//! it. Out: what the load did; the bytes are there for whatever those streams are given next.

use std::process;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::{self, CudaStream, DeviceLoadRequest, DeviceLoader, GpudirectMode};
use crate::threads::lock;

use super::error::cuda_exception;
use super::interruptible::{Stop, WaitMode, without_gil};
use super::load::{ReportDict, TensorHandle, check_targets, tensor_handle, wait_mode};
use super::memory::Memory;
use super::tensor::PyTensor;

/// Pinned memory that stays for the next load.
const MAX_IDLE_PINNED_BYTES: u64 = 64 << 20;

/// What this process loads to devices with.
static LOADER: Mutex<Option<ProcessLoader>> = Mutex::new(None);

struct ProcessLoader {
    pid: u32,
    settings: DeviceSettings,
    loader: Arc<DeviceLoader>,
}

/// How much memory may be pinned, and whether GPUDirect Storage is wanted, or not, or where it is plainly there.
type DeviceSettings = (u64, Option<bool>);

/// The loader of this process that loads so.
fn process_loader(how: DeviceSettings) -> Arc<DeviceLoader> {
    let (mut held, process) = (lock(&LOADER), process::id());
    match &*held {
        Some(held) if (held.pid, held.settings) == (process, how) => {
            return Arc::clone(&held.loader);
        }
        _ => {}
    }
    let (pinned, gpudirect) = how;
    let gpudirect = match gpudirect {
        None => GpudirectMode::Auto,
        Some(true) => GpudirectMode::On,
        Some(false) => GpudirectMode::Never,
    };
    let loader = Arc::new(DeviceLoader::new(pinned).with_gpudirect(gpudirect));
    let before =
        held.replace(ProcessLoader { pid: process, settings: how, loader: Arc::clone(&loader) });
    drop(held);
    if let Some(before) = before.filter(|before| before.pid != process) {
        // What the driver gave to another process is that one's: nothing may be done with it here.
        std::mem::forget(before);
    }
    loader
}

/// Why nothing can be loaded straight to the device of a number, in words; nothing if it can.
#[pyfunction]
pub fn lacks_device(py: Python<'_>, ordinal: usize, how: DeviceSettings) -> Option<String> {
    py.detach(|| process_loader(how).prepare(ordinal).err().map(|error| error.to_string()))
}

/// Whether a device uses the host's memory, and has none of its own.
#[pyfunction]
pub fn is_integrated(py: Python<'_>, ordinal: usize, how: DeviceSettings) -> PyResult<bool> {
    let device = py.detach(|| process_loader(how).device(ordinal));
    Ok(device.map_err(|error| cuda_exception(py, &error))?.is_integrated())
}

/// Loads tensors, each into memory of the device of its number that begins at its address, which must be there,
/// as long as the tensor and nobody else's. `streams` has of each device the stream whose work used that memory,
/// and will: what it is given once this has returned finds the bytes there.
#[pyfunction]
#[pyo3(signature = (tensors, addresses, devices, streams, how, stop=None, threads=None))]
#[allow(clippy::too_many_arguments)]
pub fn load_to_devices(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    addresses: Vec<usize>,
    devices: Vec<usize>,
    streams: Vec<(usize, usize)>,
    how: DeviceSettings,
    stop: Option<PyRef<'_, Stop>>,
    threads: Option<usize>,
) -> PyResult<ReportDict> {
    if tensors.len() != addresses.len() || tensors.len() != devices.len() {
        return Err(PyValueError::new_err("every tensor needs an address and a device"));
    }
    let tensors: Vec<TensorHandle> = tensors.iter().map(|tensor| tensor_handle(tensor)).collect();
    check_targets(&tensors, &addresses)?;
    let stop = Stop::flag(stop.as_deref());
    // The memory is the caller's, who may use it for something else from the return of this on.
    let wait = wait_mode(&tensors, WaitMode::UntilDone);
    let told_to = Arc::clone(&stop);
    let done = without_gil(py, wait, &stop, move || {
        let loader = process_loader(how);
        let users = streams.into_iter().map(|(ordinal, stream)| {
            let device = loader.device(ordinal)?;
            // SAFETY: the package has seen that this is torch's stream of this device, which torch never ends.
            #[allow(unsafe_code)]
            Ok(unsafe { CudaStream::from_raw(&device, stream) })
        });
        let users = users.collect::<Result<Vec<CudaStream>, cuda::CudaError>>()?;
        let places = addresses.into_iter().zip(devices);
        let wanted = tensors.iter().zip(places);
        let wanted = wanted.map(|((checkpoint, tensor), (at, device))| DeviceLoadRequest {
            checkpoint,
            tensor,
            device,
            address: at as u64,
        });
        // SAFETY: the package has seen that this memory belongs to contiguous tensors of that many bytes on these
        // devices, of which no two overlap, and holds on to it until this returns; who uses it then does so by
        // the streams given.
        #[allow(unsafe_code)]
        unsafe {
            loader.load_into(wanted, &users, &told_to, threads)
        }
    })?;
    Ok(ReportDict(done.map_err(|error| cuda_exception(py, &error))?))
}

/// Loads tensors into memory of a device that the driver gives, and waits until they are there. Also what that did.
#[pyfunction]
#[pyo3(signature = (tensors, device, how, stop=None, threads=None))]
pub fn load_on_device(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    device: usize,
    how: DeviceSettings,
    stop: Option<PyRef<'_, Stop>>,
    threads: Option<usize>,
) -> PyResult<(Vec<Memory>, ReportDict)> {
    let tensors: Vec<TensorHandle> = tensors.iter().map(|tensor| tensor_handle(tensor)).collect();
    let stop = Stop::flag(stop.as_deref());
    let wait = wait_mode(&tensors, WaitMode::MayAbandon);
    let told_to = Arc::clone(&stop);
    let done = without_gil(py, wait, &stop, move || {
        let tensors: Vec<_> = tensors.iter().map(|(of, tensor)| (&**of, tensor)).collect();
        process_loader(how).load_with(&tensors, device, &told_to, threads)
    })?;
    let (pieces, report) = done.map_err(|error| cuda_exception(py, &error))?;
    Ok((pieces.into_iter().map(Memory::on_device).collect(), ReportDict(report)))
}

/// Gives pinned memory that is idle back to the system, but for what a next load begins with.
#[pyfunction]
pub fn trim_pinned(py: Python<'_>) {
    py.detach(|| {
        let held = lock(&LOADER);
        let mine = held.as_ref().filter(|held| held.pid == process::id());
        let loader = mine.map(|held| Arc::clone(&held.loader));
        drop(held);
        loader.iter().for_each(|loader| loader.trim(MAX_IDLE_PINNED_BYTES));
    });
}
