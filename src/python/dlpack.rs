//! Tensors for whoever takes DLPack: cupy, jax, numpy, torch.
//!
//! In: [`Memory`] with the bytes of a tensor, on the host or a device, and its type and shape. Out: a capsule, as
//! the array API has it. Whoever takes it keeps the memory, and lets go of it when they like.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::memory::Memory;

/// A capsule that nobody has taken yet: of consumers from before 1.0, and of later ones.
const CAPSULE_NAME: &CStr = c"dltensor";
const VERSIONED_CAPSULE_NAME: &CStr = c"dltensor_versioned";

/// The version whose layout this is.
const DLPACK_VERSION: [u32; 2] = [1, 1];

#[repr(C)]
struct DlDevice {
    kind: i32,
    number: i32,
}

#[repr(C)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    axes: i32,
    kind: DlType,
    shape: *mut i64,
    strides: *mut i64,
    offset: u64,
}

/// `DLManagedTensor`, and then what is only ours.
#[repr(C)]
struct ManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
    owner: CapsuleOwner,
}

/// `DLManagedTensorVersioned`, likewise.
#[repr(C)]
struct ManagedTensorVersioned {
    version: [u32; 2],
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned)>,
    flags: u64,
    tensor: DlTensor,
    owner: CapsuleOwner,
}

/// What a capsule's tensor points into.
struct CapsuleOwner {
    _memory: Py<Memory>,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
}

/// A capsule of a contiguous tensor: its type as DLPack numbers it, with the bits of an element.
#[pyfunction]
pub fn dlpack<'py>(
    py: Python<'py>,
    memory: Bound<'py, Memory>,
    code: u8,
    bits: u8,
    shape: Vec<i64>,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let elements = shape.iter().try_fold(1_i64, |n, size| n.checked_mul(*size).filter(|n| *n >= 0));
    let bytes = elements.and_then(|n| n.checked_mul(i64::from(bits))).map(|bits| bits / 8);
    if bytes != i64::try_from(memory.get().len()).ok() {
        return Err(PyBufferError::new_err("the memory is not as long as the tensor"));
    }
    let mut strides: Vec<i64> = shape
        .iter()
        .rev()
        .scan(1, |step, size| {
            let here = *step;
            *step *= (*size).max(1);
            Some(here)
        })
        .collect();
    strides.reverse();
    let (shape, strides) = (shape.into_boxed_slice(), strides.into_boxed_slice());
    let (kind, number) = memory.get().dlpack_device();
    let tensor = DlTensor {
        data: ptr::with_exposed_provenance_mut(memory.get().address()),
        device: DlDevice { kind, number },
        axes: i32::try_from(shape.len()).map_err(|_| PyBufferError::new_err("too many axes"))?,
        kind: DlType { code, bits, lanes: 1 },
        shape: shape.as_ptr().cast_mut(),
        strides: strides.as_ptr().cast_mut(),
        offset: 0,
    };
    let owner = CapsuleOwner { _memory: memory.unbind(), _shape: shape, _strides: strides };
    let context = ptr::null_mut();
    let capsule = if versioned {
        let delete: unsafe extern "C" fn(*mut ManagedTensorVersioned) = delete_managed;
        let (version, delete) = (DLPACK_VERSION, Some(delete));
        let managed = ManagedTensorVersioned { version, context, delete, flags: 0, tensor, owner };
        let managed = Box::into_raw(Box::new(managed));
        // SAFETY: the capsule owns what it points to until somebody takes it, or its destructor frees it.
        unsafe {
            ffi::PyCapsule_New(
                managed.cast(),
                VERSIONED_CAPSULE_NAME.as_ptr(),
                Some(free_versioned_capsule),
            )
        }
    } else {
        let delete: unsafe extern "C" fn(*mut ManagedTensor) = delete_managed;
        let managed = ManagedTensor { tensor, context, delete: Some(delete), owner };
        let managed = Box::into_raw(Box::new(managed));
        // SAFETY: as above.
        unsafe { ffi::PyCapsule_New(managed.cast(), CAPSULE_NAME.as_ptr(), Some(free_capsule)) }
    };
    // SAFETY: a new reference, or none and an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Called by whoever took a tensor, once, from any thread.
unsafe extern "C" fn delete_managed<T>(managed: *mut T) {
    // SAFETY: it was made by `Box::into_raw` of this type, and whoever took it calls this once.
    let mut managed = Some(unsafe { Box::from_raw(managed) });
    let _ = Python::try_attach(|_| drop(managed.take()));
    // Where the interpreter is gone it stays.
    std::mem::forget(managed);
}

/// Python lets go of a capsule. One that was taken has another name, and is not ours any more.
unsafe extern "C" fn free_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with a capsule of ours; what it holds is there if the name is still this.
    unsafe { free_if_untaken::<ManagedTensor>(capsule, CAPSULE_NAME) }
}

unsafe extern "C" fn free_versioned_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe { free_if_untaken::<ManagedTensorVersioned>(capsule, VERSIONED_CAPSULE_NAME) }
}

unsafe fn free_if_untaken<T>(capsule: *mut ffi::PyObject, name: &CStr) {
    // SAFETY: the caller's word.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, name.as_ptr());
            delete_managed(managed.cast::<T>());
        }
    }
}
