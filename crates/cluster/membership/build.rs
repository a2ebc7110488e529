//! Makes the gRPC messages, clients and servers from the files in proto/, without protoc: protox reads them.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let build =
        |server: bool| tonic_prost_build::configure().build_server(server).build_client(true).build_transport(false);
    build(true).compile_fds(protox::compile(["spurline/group.proto"], ["proto"])?)?;
    build(false).compile_fds(protox::compile(["etcd/rpc.proto"], ["proto"])?)?;
    Ok(())
}
