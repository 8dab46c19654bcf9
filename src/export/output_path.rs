//! Refuses output paths that are URLs, or have the suffix of another format.

use std::path::{Path, PathBuf};

use crate::source::{SourceUrl, url_scheme};

use super::ExportError;

/// Suffixes by which programs take a file for another format. Any other suffix says nothing about it.
const OTHER_FORMAT_SUFFIXES: [&str; 24] = [
    "bin", "ckpt", "distcp", "gguf", "ggml", "h5", "hdf5", "json", "keras", "mar", "msgpack",
    "nemo", "npy", "npz", "onnx", "pb", "pickle", "pkl", "pt", "pth", "tar", "tflite", "yaml",
    "zip",
];

/// Refuses a path that cannot be written: a URL, or, unless any suffix is allowed, the name of another format.
pub fn check_output_path(path: &Path, any_suffix: bool) -> Result<(), ExportError> {
    if let Some(scheme) = url_scheme(path) {
        // Of a URL that names no source only the scheme is shown: the rest may be a secret.
        let path = match SourceUrl::parse(path) {
            Some(Ok(url)) => url.to_shown_path(),
            _ => format!("{scheme}://…").into(),
        };
        return Err(ExportError::Url { path });
    }
    if any_suffix { Ok(()) } else { check_suffix(path) }
}

/// Refuses a path with the suffix of another format, in whatever case.
fn check_suffix(path: &Path) -> Result<(), ExportError> {
    let suffix = path.extension().map(|suffix| suffix.to_string_lossy().to_ascii_lowercase());
    match suffix {
        Some(suffix) if OTHER_FORMAT_SUFFIXES.contains(&&*suffix) => {
            let right_path = safetensors_name(path);
            Err(ExportError::OtherSuffix { path: path.to_path_buf(), suffix, right_path })
        }
        _ => Ok(()),
    }
}

/// The path with the suffix of safetensors in the place of its own.
pub fn safetensors_name(path: &Path) -> PathBuf {
    path.with_extension("safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_formats_are_refused_with_the_right_name() {
        for (name, right) in [
            ("x.bin", "x.safetensors"),
            ("out/pytorch_model.fp16.bin", "out/pytorch_model.fp16.safetensors"),
            ("a.b.CKPT", "a.b.safetensors"),
            ("x.Pt", "x.safetensors"),
            ("x.gguf", "x.safetensors"),
        ] {
            match check_suffix(Path::new(name)) {
                Err(ExportError::OtherSuffix { path, right_path, .. }) => {
                    assert_eq!((&*path, &*right_path), (Path::new(name), Path::new(right)));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        for name in
            ["x.safetensors", "x.sft", "x", ".bin", "x.part", "x.bin.tmp", "/dev/fd/3", "v1.5"]
        {
            assert!(check_suffix(Path::new(name)).is_ok(), "{name}");
        }
    }
}
