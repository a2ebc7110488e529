//! Makes the messages, client and server of kubelet's device-plugin API from proto/, without protoc: protox reads it.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["deviceplugin/v1beta1.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(true).build_client(true).build_transport(false).compile_fds(files)?;
    Ok(())
}
