//! Loading tensors to CUDA devices.
//!
//! In: tensors, addresses of memory on devices, and the streams of the work that uses it. Out: what the load did. Work
//! that those streams get afterwards finds the bytes there.

use std::process;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cuda::{self, CudaStream, DeviceLoadRequest, DeviceLoader, GpudirectMode};
use crate::threads::lock;

use super::error::cuda_exception;
use super::interruptible::{StopFlag, WaitMode, without_gil};
use super::load::{ReportDict, TensorHandle, check_targets, load_new, tensor_handle, wait_mode};
use super::tensor::{PyMemory, PyTensor};

/// Pinned memory that is kept for the next load.
const MAX_IDLE_PINNED_BYTES: u64 = 64 << 20;

/// The loader of this process.
static LOADER: Mutex<Option<ProcessLoader>> = Mutex::new(None);

struct ProcessLoader {
    pid: u32,
    settings: DeviceSettings,
    loader: Arc<DeviceLoader>,
}

/// The bytes that may be pinned, and whether to use GPUDirect Storage; `None` is where its kernel module is loaded.
type DeviceSettings = (u64, Option<bool>);

/// The loader of this process, made anew for other settings.
fn process_loader(settings: DeviceSettings) -> Arc<DeviceLoader> {
    let (mut held, pid) = (lock(&LOADER), process::id());
    match &*held {
        Some(held) if (held.pid, held.settings) == (pid, settings) => {
            return Arc::clone(&held.loader);
        }
        _ => {}
    }
    let (max_pinned_bytes, gpudirect) = settings;
    let gpudirect = match gpudirect {
        None => GpudirectMode::Auto,
        Some(true) => GpudirectMode::On,
        Some(false) => GpudirectMode::Never,
    };
    let loader = Arc::new(DeviceLoader::new(max_pinned_bytes).with_gpudirect(gpudirect));
    let previous = held.replace(ProcessLoader { pid, settings, loader: Arc::clone(&loader) });
    drop(held);
    if let Some(previous) = previous.filter(|previous| previous.pid != pid) {
        // After a fork: what the driver gave to the parent must not be touched here, not even freed.
        std::mem::forget(previous);
    }
    loader
}

/// Why nothing can be loaded to a device, by its number; `None` if it can.
#[pyfunction]
pub fn device_obstacle(py: Python<'_>, ordinal: usize, settings: DeviceSettings) -> Option<String> {
    py.detach(|| process_loader(settings).prepare(ordinal).err().map(|error| error.to_string()))
}

/// Whether a device has no memory of its own, and uses the host's.
#[pyfunction]
pub fn is_integrated(py: Python<'_>, ordinal: usize, settings: DeviceSettings) -> PyResult<bool> {
    let device = py.detach(|| process_loader(settings).device(ordinal));
    Ok(device.map_err(|error| cuda_exception(py, &error))?.is_integrated())
}

/// Loads tensors, each into memory at an address of the device of a number. That must be as long as the tensor, and
/// used by nothing else. `streams` has the stream of each device whose work used that memory, and will use it. Work
/// that is queued there after this call finds the bytes.
#[pyfunction]
#[pyo3(signature = (tensors, addresses, devices, streams, settings, stop=None, threads=None))]
#[allow(clippy::too_many_arguments)]
pub fn load_to_devices(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    addresses: Vec<usize>,
    devices: Vec<usize>,
    streams: Vec<(usize, usize)>,
    settings: DeviceSettings,
    stop: Option<PyRef<'_, StopFlag>>,
    threads: Option<usize>,
) -> PyResult<ReportDict> {
    if tensors.len() != addresses.len() || tensors.len() != devices.len() {
        return Err(PyValueError::new_err("every tensor needs an address and a device"));
    }
    let tensors: Vec<TensorHandle> = tensors.iter().map(|tensor| tensor_handle(tensor)).collect();
    check_targets(&tensors, &addresses)?;
    let stop = StopFlag::shared(stop.as_deref());
    // Work cannot be abandoned: the caller may use the memory for something else once this returns.
    let wait = wait_mode(&tensors, WaitMode::UntilDone);
    let stop_flag = Arc::clone(&stop);
    let done = without_gil(py, wait, &stop, move || {
        let loader = process_loader(settings);
        let users = streams.into_iter().map(|(ordinal, stream)| {
            let device = loader.device(ordinal)?;
            #[allow(unsafe_code)]
            // SAFETY: the package has it from torch as a stream of this device, and torch never destroys one.
            Ok(unsafe { CudaStream::from_raw(&device, stream) })
        });
        let users = users.collect::<Result<Vec<CudaStream>, cuda::CudaError>>()?;
        let places = addresses.into_iter().zip(devices);
        let requests = tensors.iter().zip(places).map(|((checkpoint, tensor), (at, device))| {
            DeviceLoadRequest { checkpoint, tensor, device, address: at as u64 }
        });
        #[allow(unsafe_code)]
        // SAFETY: the package has checked that this memory belongs to contiguous tensors of that many bytes on these
        // devices. No two overlap, see above. It keeps the memory until this returns; later work that uses it is on
        // the given streams.
        unsafe {
            loader.load_into(requests, &users, &stop_flag, threads)
        }
    })?;
    Ok(ReportDict(done.map_err(|error| cuda_exception(py, &error))?))
}

/// Loads tensors into memory of a device from the driver, and waits until they are there. Returns also what was done.
#[pyfunction]
#[pyo3(signature = (tensors, device, settings, stop=None, threads=None))]
pub fn load_on_device(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    device: usize,
    settings: DeviceSettings,
    stop: Option<PyRef<'_, StopFlag>>,
    threads: Option<usize>,
) -> PyResult<(Vec<PyMemory>, ReportDict)> {
    let done = load_new(py, &tensors, stop, move |tensors, stop| {
        process_loader(settings).load_with(tensors, device, stop, threads)
    })?;
    let (pieces, report) = done.map_err(|error| cuda_exception(py, &error))?;
    Ok((pieces.into_iter().map(PyMemory::on_device).collect(), ReportDict(report)))
}

/// Returns idle pinned memory to the system, except what the next load begins with.
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
