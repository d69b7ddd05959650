//! Memory of Python: buffers of other objects, and bytes that are filled before Python sees them.
//!
//! The functions of the buffer protocol are part of the stable ABI since Python 3.11. Before, every
//! interpreter exports them too, and their structure is the same since Python 3.3: they are
//! declared here, since pyo3 leaves them out below 3.11.
//!
//! As with the files of `io`, a program must not use a buffer otherwise while a call reads into it,
//! nor change one that is written: the bytes would be mixed.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes};

/// `Py_buffer`.
#[repr(C)]
struct RawView {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

// SAFETY: the declarations are those of CPython's Include/pybuffer.h and Include/bytesobject.h.
unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawView);
    fn _PyBytes_Resize(bytes: *mut *mut ffi::PyObject, len: isize) -> c_int;
}

/// `PyBUF_SIMPLE`: bytes without a gap, whatever their format.
const SIMPLE: c_int = 0;
/// `PyBUF_WRITABLE`.
const WRITABLE: c_int = 1;

/// The memory of an object with the buffer protocol. The object neither frees nor moves it while
/// this exists.
pub struct HeldBuffer<'py> {
    view: Box<RawView>,
    /// Releasing needs the interpreter.
    _py: Python<'py>,
}

impl<'py> HeldBuffer<'py> {
    /// The memory of `object`, to be read. Raises `TypeError` or `BufferError`.
    pub fn readable(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        HeldBuffer::new(object, SIMPLE)
    }

    /// The memory of `object`, to be written. Raises `TypeError` or `BufferError`, also for memory
    /// that is read-only.
    pub fn writable(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        HeldBuffer::new(object, WRITABLE)
    }

    fn new(object: &Bound<'py, PyAny>, flags: c_int) -> PyResult<Self> {
        // The interpreter may keep the address of the structure, which therefore does not move.
        let mut view = Box::new(RawView {
            buf: ptr::null_mut(),
            obj: ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: ptr::null_mut(),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        });
        let py = object.py();
        // SAFETY: the object is alive, the thread is attached to the interpreter, and the structure
        // has the layout that it fills.
        match unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } {
            0 => Ok(HeldBuffer { view, _py: py }),
            _ => Err(PyErr::fetch(py)),
        }
    }

    fn len(&self) -> usize {
        usize::try_from(self.view.len).unwrap_or(0)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        if self.view.buf.is_null() || self.len() == 0 {
            return &[];
        }
        // SAFETY: the object keeps these bytes while the view is held. The program does not change
        // them meanwhile, see above.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast(), self.len()) }
    }

    /// The bytes, to be written. Empty unless the buffer was requested as writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.view.readonly != 0 || self.view.buf.is_null() || self.len() == 0 {
            return &mut [];
        }
        // SAFETY: as above; the object has agreed to writes.
        unsafe { std::slice::from_raw_parts_mut(self.view.buf.cast(), self.len()) }
    }
}

impl Drop for HeldBuffer<'_> {
    fn drop(&mut self) {
        // SAFETY: the view was filled, and is released once; its lifetime says that the thread is
        // attached.
        unsafe { PyBuffer_Release(&raw mut *self.view) };
    }
}

/// Makes bytes of at most `len` bytes: `fill` writes to their memory, which has any content before,
/// and returns how many of them are valid. No other code sees the object meanwhile.
pub fn fill_bytes<'py>(
    py: Python<'py>,
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> PyResult<usize>,
) -> PyResult<Bound<'py, PyBytes>> {
    let Ok(size) = isize::try_from(len) else {
        return Err(pyo3::exceptions::PyOverflowError::new_err("more bytes than memory can have"));
    };
    if size == 0 {
        return Ok(PyBytes::new(py, &[]));
    }
    // SAFETY: a null pointer requests an object without content.
    let made = unsafe { ffi::PyBytes_FromStringAndSize(ptr::null(), size) };
    // SAFETY: the result is a new reference, or null with an exception.
    let made = unsafe { Bound::from_owned_ptr_or_err(py, made) }?;
    // SAFETY: the object is of bytes; its memory has `size` bytes, and this function has the only
    // reference. `fill` gets memory without a content, as C functions do: file systems only write
    // to it.
    let room = unsafe {
        std::slice::from_raw_parts_mut(ffi::PyBytes_AsString(made.as_ptr()).cast::<u8>(), len)
    };
    let count = fill(room)?.min(len);
    if count == len {
        return Ok(made.cast_into::<PyBytes>()?);
    }
    let mut object = made.into_ptr();
    // SAFETY: the reference is the only one, and its new value, null after a failure, replaces it.
    let resized = unsafe {
        _PyBytes_Resize(&raw mut object, count as isize);
        Bound::from_owned_ptr_or_err(py, object)
    }?;
    Ok(resized.cast_into::<PyBytes>()?)
}
