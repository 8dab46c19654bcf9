//! Tensors for consumers of DLPack: cupy, jax, numpy, torch.
//!
//! In: [`PyMemory`] with the bytes of a tensor, on the host or a device, and its type and shape. Out: a capsule of the
//! array API. Its consumer keeps the memory, and frees it at any time from any thread.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::checkpoint::Dtype;

use super::tensor::PyMemory;

/// Names of a capsule that was not consumed yet: for consumers from before 1.0, and for later ones.
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

/// `DLManagedTensor`, followed by a field of our own.
#[repr(C)]
struct ManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
    owner: CapsuleOwner,
}

/// `DLManagedTensorVersioned`, followed by the same field.
#[repr(C)]
struct ManagedTensorVersioned {
    version: [u32; 2],
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned)>,
    flags: u64,
    tensor: DlTensor,
    owner: CapsuleOwner,
}

/// What the tensor of a capsule points into.
struct CapsuleOwner {
    _memory: Py<PyMemory>,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
}

/// DLPack's number for the kind of a type; `None` where it has no such type.
pub fn type_code(dtype: Dtype) -> Option<u8> {
    Some(match dtype {
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => 0,
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => 1,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => 2,
        Dtype::BF16 => 4,
        Dtype::C64 => 5,
        Dtype::Bool => 6,
        Dtype::F8E4M3 => 10,
        Dtype::F8E4M3Fnuz => 11,
        Dtype::F8E5M2 => 12,
        Dtype::F8E5M2Fnuz => 13,
        Dtype::F8E8M0 => 14,
        Dtype::F4 | Dtype::F6E2M3 | Dtype::F6E3M2 => return None,
    })
}

/// A capsule of a contiguous tensor. `dtype` is the name in a safetensors header.
#[pyfunction]
pub fn dlpack_capsule<'py>(
    py: Python<'py>,
    memory: Bound<'py, PyMemory>,
    dtype: &str,
    shape: Vec<i64>,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let dtype = Dtype::from_name(dtype).and_then(|dtype| Some((type_code(dtype)?, dtype.bits())));
    let (code, bits) = dtype.ok_or_else(|| PyValueError::new_err("DLPack has no such type"))?;
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
        kind: DlType { code, bits: bits as u8, lanes: 1 },
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
        // SAFETY: the capsule owns what it points to until it is consumed, or its destructor frees it.
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

/// Called by the consumer of a tensor, once, from any thread.
unsafe extern "C" fn delete_managed<T>(managed: *mut T) {
    // SAFETY: it was made by `Box::into_raw` of this type, and its consumer calls this once.
    let mut managed = Some(unsafe { Box::from_raw(managed) });
    let _ = Python::try_attach(|_| drop(managed.take()));
    // Without an interpreter it leaks.
    std::mem::forget(managed);
}

/// Called when Python frees a capsule. One that was consumed has another name, and belongs to its consumer.
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
