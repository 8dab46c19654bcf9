//! The options of object stores, as `ckptfs.configure` sets them, and the counters of their requests.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::source::{RemoteOverrides, RequestCounters};

/// Sets the options of stores from a dictionary with each of them. The environment decides those that are `None`.
#[pyfunction]
pub fn set_remote_options(options: &Bound<'_, PyDict>) -> PyResult<()> {
    let rest = options.copy()?;
    let overrides = RemoteOverrides {
        allow_http: take(&rest, "allow_http")?,
        anonymous: take(&rest, "anonymous")?,
        instance_metadata: take(&rest, "instance_metadata")?,
        stall_timeout: take(&rest, "stall_timeout")?,
        outage_timeout: take(&rest, "outage_timeout")?,
        poll_interval: take(&rest, "poll_interval")?,
        connections: take(&rest, "connections")?,
        cache_dir: take(&rest, "cache_dir")?,
        cache_size: take(&rest, "cache_size")?,
        cache_min_free: take(&rest, "cache_min_free")?,
        no_cache: take(&rest, "no_cache")?,
        offline: take(&rest, "offline")?,
    };
    // An option that only Python has would be without effect.
    if !rest.is_empty() {
        return Err(PyKeyError::new_err(rest.keys().unbind()));
    }
    crate::source::set_remote_options(overrides);
    Ok(())
}

/// Requests of this process to stores, received bytes, bytes from the cache on disk, and requests that were sent again.
#[pyfunction]
pub fn request_counters() -> (u64, u64, u64, u64) {
    let RequestCounters {
        requests,
        in_flight: _,
        bytes,
        bytes_per_second: _,
        cached_bytes,
        retries,
    } = crate::source::request_counters();
    (requests, bytes, cached_bytes, retries)
}

/// Removes an option from the dictionary. Nothing is interned, for the reason that `PyLoadOptions` states.
fn take<'py, T>(options: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error: Into<PyErr>>,
{
    let value = options.as_any().get_item(name)?;
    options.del_item(name)?;
    value.extract().map_err(Into::into)
}
