// Command registrar announces a CSI driver to the kubelet, with the flags of csi-node-driver-registrar, for which it stands
// in: that program is in no module that tests can fetch.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The driver that the tests have.
const driver = "csi.spurline.io"

type registrar struct {
	registration.UnimplementedRegistrationServer
	endpoint string
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: driver, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (r registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Fatalf("kubelet refuses the driver: %s", status.Error)
	}
	log.Printf("registered")
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	address := flag.String("csi-address", "", "the driver's socket in this container")
	endpoint := flag.String("kubelet-registration-path", "", "the driver's socket on the host")
	dir := flag.String("plugin-registration-path", "/registration", "kubelet's directory of registrations")
	flag.Parse()
	for {
		conn, err := net.Dial("unix", *address)
		if err == nil {
			conn.Close()
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	socket := filepath.Join(*dir, driver+"-reg.sock")
	os.Remove(socket)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, registrar{endpoint: *endpoint})
	log.Fatal(server.Serve(listener))
}
