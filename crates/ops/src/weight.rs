// SPDX-License-Identifier: Apache-2.0

//! [`Weight`]: a tensor of the model with its type and shape; [`Linear`] and [`Experts`]: layers
//! made of weights.

use crate::Backend;
use quant::DType;

/// One tensor of the model, as the backend addresses it.
pub struct Weight<B: Backend> {
    pub dtype: DType,
    /// In GGUF order: `dims[0]` is the row length, which is the input dimension. Never empty;
    /// trailing ones are dropped.
    pub dims: Vec<usize>,
    /// Layout number of `quant::layout`; 0 is the layout of the file.
    pub layout: u32,
    pub data: B::Data,
}

impl<B: Backend> Clone for Weight<B> {
    fn clone(&self) -> Self {
        Self { dtype: self.dtype, dims: self.dims.clone(), layout: self.layout, data: self.data.clone() }
    }
}

impl<B: Backend> Weight<B> {
    /// Row length.
    pub fn cols(&self) -> usize {
        self.dims[0]
    }

    /// Number of rows over all further dimensions.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product()
    }
}

/// `y = weight x (+ bias)`; `weight` is `[n_in, n_out]` in GGUF order.
pub struct Linear<B: Backend> {
    pub weight: Weight<B>,
    /// f32, `[n_out]`.
    pub bias: Option<Weight<B>>,
}

impl<B: Backend> Clone for Linear<B> {
    fn clone(&self) -> Self {
        Self { weight: self.weight.clone(), bias: self.bias.clone() }
    }
}

impl<B: Backend> Linear<B> {
    pub fn n_in(&self) -> usize {
        self.weight.cols()
    }

    pub fn n_out(&self) -> usize {
        self.weight.rows()
    }
}

/// The gated feed-forward layers of a mixture of experts. The last dimension counts experts.
pub struct Experts<B: Backend> {
    /// `[n_in, hidden, experts]`.
    pub gate: Weight<B>,
    /// `[n_in, hidden, experts]`.
    pub up: Weight<B>,
    /// `[hidden, n_in, experts]`.
    pub down: Weight<B>,
    /// Experts that each row goes through.
    pub used: usize,
}

impl<B: Backend> Clone for Experts<B> {
    fn clone(&self) -> Self {
        Self { gate: self.gate.clone(), up: self.up.clone(), down: self.down.clone(), used: self.used }
    }
}

impl<B: Backend> Experts<B> {
    pub fn n_in(&self) -> usize {
        self.gate.cols()
    }

    /// Hidden width of one expert.
    pub fn hidden(&self) -> usize {
        self.down.cols()
    }

    pub fn count(&self) -> usize {
        self.gate.dims.get(2).copied().unwrap_or(1)
    }
}
