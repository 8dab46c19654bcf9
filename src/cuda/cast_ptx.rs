//! The kernels that cast values on a device, as text in the driver's language (PTX). The driver compiles it.
//!
//! They give the same bits as the casts in `checkpoint/tensor/cast`. A value goes through an `f32`, and every NaN becomes
//! the same one of its type. Only the types that models are trained and served in are cast here.

use std::ffi::CStr;

use crate::checkpoint::Dtype;

/// The name of each kernel.
pub const KERNEL_NAME: &CStr = c"cast";

/// Threads of a block of a kernel. Each casts one value.
pub const THREADS_PER_BLOCK: u32 = 256;

/// A kernel `cast(source, target, count)`, where both are addresses; `None` if values are cast only on the host.
pub fn cast_ptx(from: Dtype, to: Dtype) -> Option<String> {
    let (load, store) = (load_float(from)?, store_float(to)?);
    let [from_bytes, to_bytes] = [from, to].map(|dtype| dtype.bits() / 8);
    Some(format!(
        "\
.version 6.0
.target sm_50
.address_size 64
.visible .entry cast(.param .u64 source, .param .u64 target, .param .u64 count)
{{
.reg .pred %p<2>;
.reg .b16 %h<1>;
.reg .b32 %r<4>;
.reg .b64 %a<6>;
.reg .f32 %f<1>;
.reg .f64 %d<1>;
ld.param.u64 %a0, [source];
ld.param.u64 %a1, [target];
ld.param.u64 %a2, [count];
mov.u32 %r0, %ctaid.x;
mov.u32 %r1, %ntid.x;
mov.u32 %r2, %tid.x;
mul.wide.u32 %a3, %r0, %r1;
cvt.u64.u32 %a4, %r2;
add.u64 %a3, %a3, %a4;
setp.ge.u64 %p0, %a3, %a2;
@%p0 bra done;
mad.lo.u64 %a4, %a3, {from_bytes}, %a0;
mad.lo.u64 %a5, %a3, {to_bytes}, %a1;
{load}{store}done:
ret;
}}
"
    ))
}

/// Loads the value at `%a4` into `%f0`.
fn load_float(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::F64 => "ld.global.f64 %d0, [%a4];\ncvt.rn.f32.f64 %f0, %d0;\n",
        Dtype::F32 => "ld.global.f32 %f0, [%a4];\n",
        Dtype::F16 => "ld.global.b16 %h0, [%a4];\ncvt.f32.f16 %f0, %h0;\n",
        Dtype::BF16 => {
            "ld.global.u16 %h0, [%a4];\ncvt.u32.u16 %r0, %h0;\nshl.b32 %r0, %r0, 16;\nmov.b32 %f0, %r0;\n"
        }
        // The upper half of an f16.
        Dtype::F8E5M2 => "ld.global.u8 %h0, [%a4];\nshl.b16 %h0, %h0, 8;\ncvt.f32.f16 %f0, %h0;\n",
        // The bits of a magnitude are those of an f16 that is 256 times smaller. The last one is NaN.
        Dtype::F8E4M3 => {
            "\
ld.global.u8 %r0, [%a4];
and.b32 %r1, %r0, 127;
shl.b32 %r2, %r1, 7;
cvt.u16.u32 %h0, %r2;
cvt.f32.f16 %f0, %h0;
mul.f32 %f0, %f0, 0f43800000;
mov.b32 %r2, %f0;
and.b32 %r3, %r0, 128;
shl.b32 %r3, %r3, 24;
or.b32 %r2, %r2, %r3;
setp.eq.u32 %p1, %r1, 127;
selp.b32 %r2, 0x7fc00000, %r2, %p1;
mov.b32 %f0, %r2;
"
        }
        _ => return None,
    })
}

/// Stores `%f0` at `%a5`, rounded to the nearest value, to even on a tie.
fn store_float(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::F64 => {
            "\
cvt.f64.f32 %d0, %f0;
mov.b64 %a4, %d0;
setp.nan.f32 %p1, %f0, %f0;
selp.b64 %a4, 0x7ff8000000000000, %a4, %p1;
st.global.b64 [%a5], %a4;
"
        }
        Dtype::F32 => {
            "\
mov.b32 %r0, %f0;
setp.nan.f32 %p1, %f0, %f0;
selp.b32 %r0, 0x7fc00000, %r0, %p1;
st.global.b32 [%a5], %r0;
"
        }
        Dtype::F16 => {
            "\
cvt.rn.f16.f32 %h0, %f0;
setp.nan.f32 %p1, %f0, %f0;
selp.b16 %h0, 0x7e00, %h0, %p1;
st.global.b16 [%a5], %h0;
"
        }
        // Adds what rounds the lower half off.
        Dtype::BF16 => {
            "\
mov.b32 %r0, %f0;
shr.u32 %r1, %r0, 16;
and.b32 %r1, %r1, 1;
add.u32 %r1, %r1, 32767;
add.u32 %r0, %r0, %r1;
shr.u32 %r0, %r0, 16;
setp.nan.f32 %p1, %f0, %f0;
selp.b32 %r0, 0x7fc0, %r0, %p1;
cvt.u16.u32 %h0, %r0;
st.global.b16 [%a5], %h0;
"
        }
        _ => return None,
    })
}
