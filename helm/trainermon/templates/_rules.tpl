{{/* files/prometheus_rules.yaml with the site's changes. In it `THRESHOLD`, `JOB` and `RUNBOOK_URL` stand for values. */}}
{{- define "trainermon.ruleGroups" -}}
{{- $settings := .Values.prometheusRule -}}
{{- $known := list -}}
{{- $groups := list -}}
{{- range $group := (.Files.Get "files/prometheus_rules.yaml" | fromYaml).groups -}}
{{- $rules := list -}}
{{- range $entry := $group.rules -}}
{{- if not $entry.alert -}}
{{- $rules = append $rules $entry -}}
{{- else -}}
{{- $known = append $known $entry.alert -}}
{{- $changes := get $settings.alerts $entry.alert | default dict -}}
{{- if ne (toString $changes.enabled) "false" -}}
{{- $rules = append $rules (include "trainermon.alert" (dict "root" $ "entry" $entry "changes" $changes) | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $rules -}}
{{- $groups = append $groups (dict "name" $group.name "rules" $rules) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $settings.alerts -}}
{{- if not (has $name $known) -}}
{{- fail (printf "prometheusRule.alerts.%s: there is no such alert, expected one of %s" $name (join ", " (sortAlpha $known))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end }}

{{/* Where the runbooks can be read. */}}
{{- define "trainermon.runbookUrl" -}}
{{- if .Values.prometheusRule.runbookUrl -}}
{{- trimSuffix "/" .Values.prometheusRule.runbookUrl -}}
{{- else -}}
http{{ if .Values.access.tls.existingSecret }}s{{ end }}://{{ include "trainermon.fullname" . }}-controller.{{ .Release.Namespace }}.svc:{{ .Values.controller.port }}/runbook
{{- end -}}
{{- end }}

{{/* One alert. Arguments: root, entry (from the file), changes (from the values). */}}
{{- define "trainermon.alert" -}}
{{- $settings := .root.Values.prometheusRule -}}
{{- $entry := omit .entry "threshold" -}}
{{- $threshold := .entry.threshold -}}
{{- if hasKey .changes "threshold" -}}
{{- if not (hasKey .entry "threshold") -}}
{{- fail (printf "prometheusRule.alerts.%s.threshold: this alert compares with no number; its conditions are in agent.rules" .entry.alert) -}}
{{- end -}}
{{- $threshold = .changes.threshold -}}
{{- end -}}
{{- $job := printf "%s(-controller)?" (.root.Values.podMonitor.job | replace "." "\\\\.") -}}
{{- $expr := .changes.expr | default $entry.expr | replace "THRESHOLD" (toString $threshold) | replace "JOB" $job -}}
{{- $_ := set $entry "expr" $expr -}}
{{- with get .changes "for" }}{{ $_ := set $entry "for" . }}{{ end -}}
{{- with .changes.keepFiringFor }}{{ $_ := set $entry "keep_firing_for" . }}{{ end -}}
{{- $labels := dict -}}
{{- with .changes.severity }}{{ $_ := set $labels "severity" . }}{{ end -}}
{{- $_ := set $entry "labels" (merge $labels (.changes.labels | default dict) $entry.labels $settings.alertLabels) -}}
{{- $url := $entry.annotations.runbook_url | replace "RUNBOOK_URL" (include "trainermon.runbookUrl" .root) -}}
{{- $_ := set $entry.annotations "runbook_url" $url -}}
{{- toYaml $entry -}}
{{- end }}
