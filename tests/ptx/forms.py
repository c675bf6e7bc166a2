"""Opcodes with modifiers that the emulator must know: what compilers emit for our kernels.

Counted in November 2026 in the PTX of Triton 3.9 for all our kernels, and in that of nvcc 13 for csrc/cuda.
"""

# Triton, sm_80
TRITON = """
abs.bf16 abs.f32 add.f32 add.s32 add.s64 and.b16 and.b32 and.b64 and.pred bar.sync bar.warp.sync bfe.s32 bfe.u32
bra bra.uni cp.async.ca.shared.global cp.async.cg.shared.global cp.async.commit_group cp.async.wait_group
cvt.f32.bf16 cvt.rn.bf16.f32 cvt.rn.bf16x2.f32 cvt.rn.f32.s32 cvt.rn.f32.u32 cvt.s64.s32 cvt.u16.u32 cvt.u32.u16
cvt.u32.u64 cvt.u64.u32 div.approx.f32 div.full.f32 div.rn.f32 div.s32 ex2.approx.ftz.f32 fma.rn.f32
fma.rn.ftz.f32 ld.global.b16 ld.global.b32 ld.global.b64 ld.global.v2.b32 ld.global.v4.b32 ld.param.b32
ld.param.b64 ld.param.s32 ld.shared.b16 ld.shared.b32 ld.shared.b64 ld.shared.b8 ld.shared.v2.b16 ld.shared.v2.b32
ld.shared.v4.b16 ld.shared.v4.b32 ldmatrix.sync.aligned.m8n8.x1.shared.b16 ldmatrix.sync.aligned.m8n8.x4.shared.b16
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 mad.lo.s64 mad.wide.s32 mad.wide.u32 max.f32 max.s32 min.NaN.bf16
min.NaN.f32 min.s32 min.s64 min.u32 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 mov.b16 mov.b32 mov.b64
mov.pred mov.u16 mov.u32 mov.u64 mul.f32 mul.hi.s32 mul.hi.u32 mul.lo.s32 mul.lo.s64 mul.wide.s32 mul.wide.u32
neg.f32 neg.s32 or.b16 or.b32 or.b64 prmt.b32 redux.sync.add.s32 ret rsqrt.approx.ftz.f32 selp.b16 selp.b32
selp.f32 setp.eq.b16 setp.eq.b32 setp.eq.f32 setp.ge.s32 setp.ge.u32 setp.gt.f32 setp.gt.s32 setp.gt.u64
setp.le.s32 setp.le.s64 setp.lt.f32 setp.lt.s32 setp.lt.s64 setp.lt.u32 setp.lt.u64 setp.ne.b16 setp.ne.b32
shfl.sync.bfly.b32 shfl.sync.idx.b32 shl.b16 shl.b32 shl.b64 shr.s32 shr.s64 shr.u16 shr.u32 shr.u64 sqrt.rn.f32
st.global.b16 st.global.b32 st.global.v2.b32 st.global.v4.b32 st.shared.b16 st.shared.b32 st.shared.b8
st.shared.v2.b16 st.shared.v2.b32 st.shared.v2.b8 st.shared.v4.b16 st.shared.v4.b32 sub.f32 sub.s32 sub.s64
xor.b32 xor.b64
abs.bf16x2 abs.f16x2 atom.global.gpu.acq_rel.add.u32 cvt.rn.f16x2.f32 ex2.approx.f32 ld.global.cg.v4.b32
ldmatrix.sync.aligned.m8n8.x2.shared.b16 max.bf16 max.u32 min.NaN.bf16x2 min.NaN.f16x2 min.f32
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 not.b32 redux.sync.max.s32 setp.gt.bf16x2 setp.gt.f16x2 setp.gt.s64
setp.nan.f32 setp.ne.b64 setp.neu.f32 st.global.b64 st.shared::cta.b32
""".split()

# nvcc, csrc/cuda for sm_80
NVCC = """
add.f32 add.s32 add.s64 and.b32 and.b64 bar.sync bra bra.uni cvt.f32.f16 cvt.rn.f16.f32 cvt.rn.f32.f64
cvt.rn.f32.s64 cvt.s64.s32 cvt.u32.u16 cvt.u32.u64 cvt.u64.u32 cvta.to.global.u64 fma.rn.f32 ld.global.f32
ld.global.u16 ld.global.u64 ld.global.v4.f32 ld.global.v4.u32 ld.param.f32 ld.param.f64 ld.param.u32 ld.param.u64
ld.param.v2.u32 ld.shared.f32 mad.lo.s32 max.s64 mov.b32 mov.b64 mov.f32 mov.pred mov.u16 mov.u32 mov.u64 mul.f32
mul.lo.s32 mul.lo.s64 mul.wide.s32 mul.wide.u32 neg.s64 not.b64 or.pred rcp.rn.f32 ret selp.b32 selp.b64 selp.f32
setp.eq.b32 setp.eq.b64 setp.eq.s32 setp.eq.s64 setp.ge.s64 setp.gt.u32 setp.le.s64 setp.lt.f32 setp.lt.s32
setp.lt.s64 setp.lt.u32 setp.lt.u64 setp.ne.s32 setp.ne.s64 shfl.sync.bfly.b32 shl.b32 shl.b64 shr.s32 shr.u32
shr.u64 sqrt.rn.f32 st.global.f32 st.global.u16 st.global.u32 st.global.v4.f32 st.global.v4.u32 st.shared.f32
sub.f32 sub.s32 xor.b32 xor.b64
""".split()

# what either would emit for other activations, dtypes and tiles
ARITHMETIC = """
max.NaN.f32 bfi.b32 copysign.f32 lg2.approx.f32 rcp.approx.ftz.f32
rsqrt.approx.f32 tanh.approx.f32 setp.ltu.f32 setp.ge.f32 setp.le.f32 setp.ne.f32 setp.gt.bf16
mad.lo.u32 not.pred xor.pred rem.s32 rem.u32 div.u32 mul.hi.s64 mul.hi.u64
cvt.rzi.s32.f32 cvt.rni.s32.f32 shf.l.wrap.b32 selp.u32
""".split()
