//! Functions that bindings look up and no test needs: they exist, and report that they are not supported.

use crate::codes::{self, Code};
use crate::driver::{Needs, call};
use crate::names::with_unsupported_names;

macro_rules! define {
    (unsupported { $($name:ident)* }) => {
        $(
            /// Fails with `NOT_SUPPORTED`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> Code {
                call(stringify!($name), Needs::Nothing, |_| Err(codes::NOT_SUPPORTED))
            }
        )*
    };
}

with_unsupported_names!(define);
