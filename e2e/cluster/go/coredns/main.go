// CoreDNS with the plugins that a cluster's DNS needs and no others: upstream's main also links the SDKs of three clouds,
// which doubles the build's time.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
)

func main() {
	// The order in which a query passes through the plugins.
	dnsserver.Directives = []string{"reload", "health", "ready", "prometheus", "errors", "cache", "kubernetes"}
	coremain.Run()
}
