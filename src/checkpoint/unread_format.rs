//! File formats that are told apart and not read: what each is called, and what the user can do.

use std::fmt;
use std::path::Path;

use crate::shell_word::{shell_text, shell_word};

use super::conversions::{folder_of, output_path, python_command};

/// What a file is that no reader here takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnreadFormat {
    /// No bytes at all.
    Empty,
    /// A model of llama.cpp.
    Gguf,
    /// Keras and others.
    Hdf5,
    /// One array of numpy.
    Numpy,
    /// A zip archive that torch did not write.
    ZipArchive {
        /// Whether it holds arrays of numpy (`.npz`).
        has_arrays: bool,
    },
    /// A tar archive, such as a `.nemo`.
    Tar,
    /// A file that a general compressor packed; `program` unpacks it.
    Compressed {
        /// The program that unpacks it.
        program: &'static str,
    },
    /// What git has in the place of a large file that was not fetched.
    LfsPointer,
    /// A page for a browser (HTML).
    WebPage,
    /// Markup of another kind than HTML.
    Xml,
    /// Text that begins as JSON does.
    Json,
    /// Text of any other kind.
    Text,
    /// A pickle with the extension of safetensors.
    MisnamedPickle,
    /// A pickle without torch's magic number, and the class that it is of.
    Pickle {
        /// `module.name`; `None` if it is no object.
        class: Option<String>,
    },
    /// A program with its weights, as `torch.jit.save` writes it.
    TorchScript,
    /// The `.metadata` of a folder of torch.distributed.checkpoint.
    DcpMetadata,
    /// One rank's data in such a folder.
    DcpData,
    /// None of the others.
    Unknown,
}

impl UnreadFormat {
    /// Whether it holds the weights of a model that torch saved, and not something else.
    pub fn is_torch(&self) -> bool {
        match self {
            UnreadFormat::TorchScript | UnreadFormat::DcpMetadata | UnreadFormat::DcpData => true,
            UnreadFormat::Empty
            | UnreadFormat::Gguf
            | UnreadFormat::Hdf5
            | UnreadFormat::Numpy
            | UnreadFormat::ZipArchive { .. }
            | UnreadFormat::Tar
            | UnreadFormat::Compressed { .. }
            | UnreadFormat::LfsPointer
            | UnreadFormat::WebPage
            | UnreadFormat::Xml
            | UnreadFormat::Json
            | UnreadFormat::Text
            | UnreadFormat::MisnamedPickle
            | UnreadFormat::Pickle { .. }
            | UnreadFormat::Unknown => false,
        }
    }

    /// Whether it stands where a checkpoint should be, so that its folder is not simply without one.
    pub fn replaces_checkpoint(&self) -> bool {
        self.is_failed_download()
            || matches!(self, UnreadFormat::Gguf | UnreadFormat::Pickle { .. })
    }

    /// Whether it is what a download leaves in the place of a file that it did not fetch.
    pub fn is_failed_download(&self) -> bool {
        matches!(
            self,
            UnreadFormat::Empty
                | UnreadFormat::LfsPointer
                | UnreadFormat::WebPage
                | UnreadFormat::Xml
        )
    }

    /// What the user can do about the file at a path.
    pub fn remedy(&self, path: &Path) -> String {
        let word = shell_word(path);
        match self {
            UnreadFormat::Empty => "fetch or save it again".to_owned(),
            UnreadFormat::Gguf => {
                "load it with llama.cpp, or fetch the model as .safetensors instead".to_owned()
            }
            UnreadFormat::Hdf5 => {
                "load it with Keras or h5py, or fetch the model as .safetensors instead".to_owned()
            }
            UnreadFormat::Numpy | UnreadFormat::ZipArchive { has_arrays: true } => {
                "load it with numpy.load".to_owned()
            }
            UnreadFormat::ZipArchive { has_arrays: false } => {
                format!("see what is in it, and unpack that: python -m zipfile -l {word}")
            }
            UnreadFormat::Tar => {
                format!("see what is in it, and unpack that: tar -tvf {word}")
            }
            UnreadFormat::Compressed { program } => {
                format!("unpack it: {program} < {word} > {}", shell_word(&unpacked_path(path)))
            }
            UnreadFormat::LfsPointer => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let directory = folder_of(path);
                let (directory, name) = (shell_word(directory), shell_text(&name));
                format!("fetch the file: git -C {directory} lfs pull --include={name}")
            }
            UnreadFormat::WebPage | UnreadFormat::Xml | UnreadFormat::Json | UnreadFormat::Text => {
                format!(
                    "read what it says (head -c 500 {word}), and fetch the file again, logged in where that is needed"
                )
            }
            UnreadFormat::MisnamedPickle => {
                "fetch the .safetensors again: torch.save did not write this one, so another name does not help"
                    .to_owned()
            }
            UnreadFormat::Pickle { .. } => {
                "in the program that wrote it, save the tensors with torch.save or as .safetensors"
                    .to_owned()
            }
            UnreadFormat::TorchScript => {
                let code = "import sys, torch; torch.save(torch.jit.load(sys.argv[1], map_location=\"cpu\").state_dict(), sys.argv[2])";
                let out = output_path(path, ".state_dict.pt");
                let command = python_command(code, &[path, &out]);
                format!("if you trust it, run it and save its state dict: {command}")
            }
            UnreadFormat::DcpMetadata | UnreadFormat::DcpData => {
                format!("give the folder: {}", shell_word(folder_of(path)))
            }
            UnreadFormat::Unknown => {
                "give a .safetensors file, a torch checkpoint, or a directory that holds one"
                    .to_owned()
            }
        }
    }
}

/// The name of a packed file without the extension of its packer, or with another one, in the current directory.
fn unpacked_path(path: &Path) -> std::path::PathBuf {
    let is_packer = path.extension().is_some_and(|e| {
        ["gz", "zst", "xz", "bz2"].iter().any(|packer| e.eq_ignore_ascii_case(packer))
    });
    if is_packer {
        output_path(&path.with_extension(""), "")
    } else {
        output_path(path, ".unpacked")
    }
}

impl fmt::Display for UnreadFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UnreadFormat::Empty => "an empty file",
            UnreadFormat::Gguf => "a GGUF file, not a checkpoint of torch or safetensors",
            UnreadFormat::Hdf5 => "an HDF5 file, not a checkpoint of torch or safetensors",
            UnreadFormat::Numpy => "an array of numpy, not a checkpoint of torch or safetensors",
            UnreadFormat::ZipArchive { has_arrays: true } => {
                "arrays of numpy (npz), not a checkpoint of torch or safetensors"
            }
            UnreadFormat::ZipArchive { has_arrays: false } => {
                "a zip archive of another kind than torch's: it has no data.pkl"
            }
            UnreadFormat::Tar => "a tar archive, not a checkpoint of torch or safetensors",
            UnreadFormat::Compressed { program } => {
                return write!(f, "a compressed file, which `{program}` unpacks");
            }
            UnreadFormat::LfsPointer => {
                "a Git LFS pointer: the file that it stands for was not fetched"
            }
            UnreadFormat::WebPage => {
                "a web page (HTML), most likely an error or a login saved in place of a download"
            }
            UnreadFormat::Xml => "XML, most likely an error saved in place of a download",
            UnreadFormat::Json => "JSON text, not a checkpoint of torch or safetensors",
            UnreadFormat::Text => "text, not a checkpoint of torch or safetensors",
            UnreadFormat::MisnamedPickle => "a pickle with the extension .safetensors",
            UnreadFormat::Pickle { class: Some(class) } => {
                return write!(f, "a pickle of {class} that torch.save did not write");
            }
            UnreadFormat::Pickle { class: None } => "a pickle that torch.save did not write",
            UnreadFormat::TorchScript => "a TorchScript program, not a checkpoint",
            UnreadFormat::DcpMetadata => {
                "the metadata of a folder of torch.distributed.checkpoint (DCP)"
            }
            UnreadFormat::DcpData => {
                "one rank's data in a folder of torch.distributed.checkpoint (DCP)"
            }
            UnreadFormat::Unknown => "not a checkpoint of torch or safetensors",
        })
    }
}
