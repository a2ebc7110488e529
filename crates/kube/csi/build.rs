//! Makes the gRPC messages and servers from proto/csi.proto (CSI 1.12, with its licence), without protoc: protox
//! reads it.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["csi.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(true).build_client(true).build_transport(false).compile_fds(files)?;
    Ok(())
}
