//! The suite that every transport must pass.
