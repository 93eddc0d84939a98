// SPDX-License-Identifier: Apache-2.0

//! Products of one token with what comes before or after them in a layer, in one launch of
//! linear/matvec.cuh: the norm of the input, or the sum with the residual stream.

use ops::OpError;
use quant::DType;

use super::abi::linear::{LinearMatvec, LinearNormMatvec, NORM_PRODUCT_COLS_MAX, NormedInput};
use super::error::device_error;
use super::launch::{KernelName, launch_kernel};
use super::linear::{
    LinearKernels, MatrixProduct, NO_SHARED_MEMORY, OP, check_products, in_op, linear_params, no_kernel,
};
use super::linear_names::{matvec_name, norm_matvec_name};
use super::quantize::QuantizedActivations;
use super::{DeviceView, DeviceViewMut, Stream};

/// A row that is normalised before it is multiplied. Each range has `cols` values.
pub(super) struct NormInput<'a> {
    pub(super) x: DeviceView<'a, f32>,
    pub(super) weight: DeviceView<'a, f32>,
    pub(super) eps: f32,
    pub(super) out: DeviceViewMut<'a, f32>,
}

impl NormInput<'_> {
    pub(super) fn arguments(&self, x: QuantizedActivations<'_>) -> NormedInput {
        NormedInput {
            x: self.x.address(),
            weight: self.weight.address(),
            out: self.out.address(),
            quantized: x.layout.rows(x.data.address(), x.tokens, x.cols),
            eps: self.eps,
        }
    }
}

/// Whether a product can normalise this row, and its lengths are those of `x`.
pub(super) fn check_norm(
    norm: &NormInput<'_>,
    x: QuantizedActivations<'_>,
    dtype: DType,
) -> Result<(), OpError> {
    let can_normalise = LinearKernels::can_normalise(dtype, x.tokens, x.cols);
    for (what, found, expected) in [
        ("rows that a product normalises", usize::from(can_normalise), 1),
        ("input of a norm", norm.x.len(), x.cols),
        ("weights of a norm", norm.weight.len(), x.cols),
        ("output of a norm", norm.out.len(), x.cols),
    ] {
        if found != expected {
            return Err(OpError::Shape { op: OP, what, found, expected });
        }
    }
    Ok(())
}

impl LinearKernels {
    /// Whether [`Self::launch_normed`] can multiply the norm of this row.
    pub(super) fn can_normalise(dtype: DType, tokens: usize, cols: usize) -> bool {
        Self::can_add(dtype, tokens) && cols.is_multiple_of(32) && cols <= NORM_PRODUCT_COLS_MAX
    }

    /// Whether [`Self::launch_added`] can add the product to the residual stream. The kernel
    /// is for one token.
    pub(super) fn can_add(dtype: DType, tokens: usize) -> bool {
        tokens == 1 && matvec_name(dtype).is_some()
    }

    /// Computes `norm.out = norm(norm.x)`, quantizes it to `x`, and multiplies that as
    /// [`Self::launch`] does. If rows are too long for the device's shared memory, nothing is
    /// computed and the result is `false`.
    pub(super) fn launch_normed(
        &self,
        stream: &Stream,
        norm: &mut NormInput<'_>,
        x: QuantizedActivations<'_>,
        products: &[MatrixProduct<'_>],
    ) -> Result<bool, OpError> {
        let Some(first) = products.first() else { return Ok(false) };
        let dtype = first.shape.dtype();
        check_products(x, products)?;
        check_norm(norm, x, dtype)?;
        let name = norm_matvec_name(dtype).ok_or_else(|| no_kernel(x.tokens))?;
        let Some((launch, stages)) = self.fused_launch(name, x, products)? else { return Ok(false) };
        let arguments =
            LinearNormMatvec { params: linear_params(x, products), input: norm.arguments(x), stages };
        // SAFETY: as in `launch_with`. The kernel reads a row of `cols` values and as many weights,
        // and writes such a row and its activation tiles; lengths were compared above.
        unsafe { launch_kernel(self.family(dtype)?, name, stream, launch, &arguments) }
            .map(|()| true)
            .map_err(device_error(OP))
    }

    /// Computes [`Self::launch`] for one matrix, and adds the result to `residual`. If rows are too
    /// long for the device's shared memory, nothing is computed and the result is `false`.
    pub(super) fn launch_added(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        product: &MatrixProduct<'_>,
        residual: &mut DeviceViewMut<'_, f32>,
    ) -> Result<bool, OpError> {
        let dtype = product.shape.dtype();
        let products = std::slice::from_ref(product);
        check_products(x, products)?;
        let expected = x.tokens * product.shape.rows();
        if residual.len() != expected {
            let (what, found) = ("values of the residual stream", residual.len());
            return Err(OpError::Shape { op: OP, what, found, expected });
        }
        // The kernel adds one value for each row of the matrix.
        if !Self::can_add(dtype, x.tokens) {
            return Err(no_kernel(x.tokens));
        }
        let name = matvec_name(dtype).ok_or_else(|| no_kernel(x.tokens))?;
        let Some((launch, stages)) = self.fused_launch(name, x, products)? else { return Ok(false) };
        let params = linear_params(x, products);
        let arguments = LinearMatvec { params, residual: residual.address(), stages };
        // SAFETY: as in `launch_with`. The kernel also reads and writes `tokens` rows of the
        // product's length in `residual`, which was compared above.
        unsafe { launch_kernel(self.family(dtype)?, name, stream, launch, &arguments) }
            .map(|()| true)
            .map_err(device_error(OP))
    }

    /// The launch of a matvec kernel, or none if rows are too long.
    fn fused_launch<A>(
        &self,
        name: KernelName<A>,
        x: QuantizedActivations<'_>,
        products: &[MatrixProduct<'_>],
    ) -> Result<Option<(super::LaunchConfig, i32)>, OpError> {
        let family = self.family(products[0].shape.dtype())?;
        match self.matvec_launch(family, name, x, products).map_err(in_op) {
            Ok(launch) => Ok(Some(launch)),
            Err(OpError::Shape { what: NO_SHARED_MEMORY, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
